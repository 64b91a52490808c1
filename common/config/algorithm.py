"""The section `algorithm`: the objective, and a teacher of the policy."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from common.config.knobs import FUNCTION, PATH, URL, Contradiction, knob, seconds


class Advantage(StrEnum):
    """Estimator that turns rewards into advantages.

    grpo: reward minus the group's `baseline`, optionally divided by the group's standard deviation
    (arXiv:2402.03300). rloo: reward minus the mean of the other members (arXiv:2402.14740).
    reinforce_pp: reward, whitened over all tokens of the batch (REINFORCE++, arXiv:2501.03262).
    reinforce_pp_baseline: reward minus the group's mean, then whitened as in reinforce_pp.
    ppo: a critic and generalised advantage estimation (arXiv:1707.06347, arXiv:1506.02438).
    running: reward minus a running mean of the item, for groups of one (arXiv:2509.13232). Each
    seat and opponent has its own means. With reward_level=turn each turn number has, too.
    """

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    PPO = "ppo"
    RUNNING = "running"


class Baseline(StrEnum):
    """Baseline of a group member's reward.

    leave_one_out: the mean of the other members. group_mean: the mean of all members.
    """

    LEAVE_ONE_OUT = "leave_one_out"
    GROUP_MEAN = "group_mean"


class Aggregation(StrEnum):
    """Unit with equal weight in the loss.

    token: every sampled token. sequence: every episode. constant: as token, but the sum is divided
    by episodes x `constant_tokens` instead of the number of tokens.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class CreditLevel(StrEnum):
    """Receiver of a reward or penalty: the whole episode, or its turn."""

    EPISODE = "episode"
    TURN = "turn"


class RowCredit(StrEnum):
    """Credit of the rows of an agent's episode, whose conversations are one row each.

    all: every row has the episode's advantage. root: only the conversation with which the episode
    began has it, with its continuations; rows of other conversations have none. share: a row has it
    times its share of the episode's sampled tokens.
    """

    ALL = "all"
    ROOT = "root"
    SHARE = "share"


class StateCredit(StrEnum):
    """Credit of a turn, compared with the group's turns in the same state.

    none: no such credit. gigpo: the turn's return minus the mean return in that state, added to
    the episode's advantage (arXiv:2505.10978). ecpo: the mean return of the turn's action in that
    state minus the mean return in the state, shrunk after few visits, and added to the episode's
    advantage (arXiv:2606.05885). gagpo: generalised advantage estimation over turns, with the mean
    return of a state as its value, instead of the episode's advantage (arXiv:2605.13217).
    """

    NONE = "none"
    GIGPO = "gigpo"
    ECPO = "ecpo"
    GAGPO = "gagpo"


class PolicyLoss(StrEnum):
    """The surrogate loss.

    ppo: clipped ratio per token. gspo: clipped ratio per sequence (arXiv:2507.18071).
    cispo: clipped, detached ratio as a weight of log pi (arXiv:2506.13585).
    dppo: plain ratio. Tokens are masked if their probability has already moved too far in the
    direction of the update.
    turn: clipped ratio per turn, the geometric mean over its tokens (arXiv:2605.13217).
    unclipped: plain ratio; with correction=second_moment this is M2PO (arXiv:2510.01161).
    """

    PPO = "ppo"
    GSPO = "gspo"
    CISPO = "cispo"
    DPPO = "dppo"
    TURN = "turn"
    UNCLIPPED = "unclipped"


class Correction(StrEnum):
    """Importance weight of a token, for data of other policies or precisions.

    The ratio rho is the token's probability under the proximal policy divided by its probability
    under the sampling policy (pi_prox / mu). none: 1. token_tis: min(rho, tis_cap). sequence_tis:
    min(product of rho, tis_cap) for all tokens of an episode. icepop: rho inside [mask_low,
    mask_high], else 0. geometric: 1 for an episode whose geometric mean of rho is inside
    [geometric_low, geometric_high], else 0. second_moment: 0 for the smallest set of tokens whose
    removal brings the batch mean of (log rho)^2 to m2_threshold or below, else 1 (M2PO). Its rho
    uses the policy before the step, which needs an additional forward pass.
    """

    NONE = "none"
    TOKEN_TIS = "token_tis"
    SEQUENCE_TIS = "sequence_tis"
    ICEPOP = "icepop"
    GEOMETRIC = "geometric"
    SECOND_MOMENT = "second_moment"


class Proximal(StrEnum):
    """Denominator policy of the surrogate's ratio (decoupled PPO, arXiv:2110.00641).

    auto: sampler if a batch makes one update, else recomputed. sampler: the sampling policy mu.
    recomputed: the policy before the step, which needs an additional forward pass. reused: the
    log-probabilities of a sample's first update. interpolated: a policy between mu and pi by the
    token's lag, without a forward pass (A-3PO).
    """

    AUTO = "auto"
    SAMPLER = "sampler"
    RECOMPUTED = "recomputed"
    REUSED = "reused"
    INTERPOLATED = "interpolated"


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(pi | reference) from samples.

    With d = log pi - log reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d. In the loss, k2
    and k3 reduce the KL; k1 has a gradient of mean zero.
    """

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class TeacherForm(StrEnum):
    """Form of the reverse KL divergence from the teacher.

    sampled: the advantage of a sampled token is log teacher - log pi. It needs one number a token.
    topk: the exact KL(pi | teacher) over the teacher's k most probable tokens and one remainder,
    with its gradient.
    """

    SAMPLED = "sampled"
    TOPK = "topk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """A teacher of the policy (on-policy distillation). Without path and url there is none."""

    path: str = knob(
        "",
        "Names the teacher's model folder. The run starts an engine with it.",
        form=PATH,
        also="",
    )
    url: str = knob(
        "",
        "Names the base URL of an endpoint that returns prompt logprobs, such as vLLM's "
        "http://host:8000/v1.",
        form=URL,
        also="",
    )
    model: str = knob("", "Names the teacher's model at algorithm.teacher.url.")
    key_env: str = knob("", "Names the environment variable with the key of the endpoint.")
    coef: float = knob(1.0, "Sets the weight of the reverse KL from the teacher.", gt=0, le=1000)
    reward_coef: float = knob(
        0.0,
        "Multiplies the advantages of the rewards beside a teacher. 0 learns from the teacher "
        "alone.",
        ge=0,
        le=1000,
    )
    form: TeacherForm = knob(TeacherForm.SAMPLED, "Selects the form of the reverse KL.")
    k: int = knob(
        16, "With form=topk, compares this many most probable tokens of the teacher.", ge=1, le=1024
    )
    timeout_s: float = seconds(
        60.0, "Limits the seconds of one request to the teacher.", gt=0, le=3600
    )
    concurrency: int = knob(16, "Limits the requests to the teacher at once.", ge=1, le=4096)
    max_waiting: int = knob(
        512,
        "Accepts no training episodes while at least this many wait for the teacher.",
        ge=1,
        le=10**6,
    )
    serve: list[str] = knob(
        [], "Lists overrides for the engine of algorithm.teacher.path, as KEY=VALUE."
    )
    gpus: list[int] = knob(
        [],
        "Lists the numbers of the GPUs of this engine. [] means the first GPU that no role uses.",
        ge=0,
        le=1000,
    )

    @property
    def is_on(self) -> bool:
        """Whether the policy has a teacher."""
        return bool(self.path or self.url)

    @property
    def num_top(self) -> int:
        """Number of the teacher's most probable tokens in an answer; 0: the prompt's token only."""
        return self.k if self.form is TeacherForm.TOPK else 0

    def contradictions(self) -> Iterator[Contradiction]:
        if self.path and self.url:
            yield "url", self.url, "must be empty with algorithm.teacher.path: one teacher only"
        if self.url and not self.model:
            yield "model", "", "must name the model at algorithm.teacher.url"
        for override in self.serve:
            if "=" not in override:
                yield "serve", override, "must be KEY=VALUE, such as actor.gpu_memory_frac=0.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The objective: advantages, the surrogate loss, and the correction for off-policy data."""

    advantage: Advantage | str = knob(
        Advantage.GRPO,
        "Selects the estimator that turns rewards into advantages, or names your own function.",
        form=FUNCTION,
    )
    baseline: Baseline = knob(
        Baseline.LEAVE_ONE_OUT,
        "With advantage=grpo, selects the baseline that is subtracted from a reward.",
    )
    normalize_std: bool = knob(
        False, "With advantage=grpo, divides advantages by the group's standard deviation."
    )
    normalize_per_env: bool = knob(
        False, "Divides the advantages of each environment by their root mean square over tokens."
    )
    aggregation: Aggregation = knob(
        Aggregation.TOKEN, "Selects the unit with equal weight in the loss."
    )
    constant_tokens: int = knob(
        512, "With aggregation=constant, counts an episode as this many tokens.", ge=1
    )
    reward_level: CreditLevel = knob(
        CreditLevel.EPISODE,
        "Selects where a reward is credited: to the whole `episode`, or to its `turn`, and to the "
        "turns before it by turn_discount.",
    )
    row_credit: RowCredit = knob(
        RowCredit.ALL,
        "With actor.endpoint=true, selects the rows of an agent's episode that have its advantage.",
    )
    turn_discount: float = knob(1.0, "Discounts rewards by this factor per turn.", gt=0, le=1)
    state_credit: StateCredit = knob(
        StateCredit.NONE,
        "Selects the additional credit of a turn, which compares it with the group's turns in the "
        "same state.",
    )
    state_weight: float = knob(
        1.0,
        "With state_credit=gigpo or ecpo, sets the weight of this credit beside the episode's "
        "advantage.",
        gt=0,
        le=1000,
    )
    state_discount: float = knob(
        0.95, "With state_credit, discounts the rewards after a turn, per turn.", gt=0, le=1
    )
    state_prior: float = knob(
        1.0,
        "With state_credit=ecpo, shrinks the credit as if a state had this many more visits.",
        ge=0,
        le=1000,
    )
    state_lambda: float = knob(
        0.95, "With state_credit=gagpo, sets lambda of advantage estimation.", ge=0, le=1
    )
    running_memory: float = knob(
        0.9,
        "With advantage=running, multiplies the weight of earlier rewards by this factor at each "
        "new reward of the item, and for the task in each batch.",
        ge=0,
        lt=1,
    )
    running_prior: float = knob(
        2.0,
        "With advantage=running, weighs the task's mean reward like this many rewards of the item.",
        gt=0,
    )
    invalid_action_penalty: float = knob(
        0.0,
        "Subtracts this penalty for an invalid turn, or, at level episode, its product with the "
        "share of invalid turns.",
        ge=-1000,
        le=1000,
    )
    invalid_action_level: CreditLevel = knob(
        CreditLevel.EPISODE,
        "Selects where the penalty is credited: to the whole `episode`, or to its `turn`. The "
        "turns before it share it only with reward_level=turn, advantage=ppo or state_credit.",
    )
    policy_loss: PolicyLoss | str = knob(
        PolicyLoss.PPO,
        "Selects the surrogate loss of the policy, or names your own function.",
        form=FUNCTION,
    )
    clip_low: float = knob(
        0.2, "With ppo, gspo or turn, clips the ratio at 1 minus this value.", gt=0, lt=1
    )
    clip_high: float = knob(
        0.28, "With ppo, gspo, turn or cispo, clips the ratio at 1 plus this value.", gt=0
    )
    dual_clip: float = knob(
        3.0,
        "With ppo, gspo or turn, limits the ratio of tokens with a negative advantage to this. "
        "0 sets no limit.",
        also=0,
        gt=1,
    )
    dppo_delta: float = knob(
        0.2,
        "With policy_loss=dppo, masks a token whose probability has moved by more in the direction "
        "of its advantage.",
        gt=0,
    )
    correction: Correction | str = knob(
        Correction.TOKEN_TIS,
        "Selects the importance weight of a sampled token, or names your own function. The weight "
        "corrects for data of other policies or precisions.",
        form=FUNCTION,
    )
    tis_cap: float = knob(2.0, "With correction=token_tis or sequence_tis, caps the weights.", gt=0)
    mask_low: float = knob(
        0.5, "With correction=icepop, masks tokens whose ratio rho is smaller.", gt=0, lt=1
    )
    mask_high: float = knob(
        5.0, "With correction=icepop, masks tokens whose ratio rho is larger.", gt=1
    )
    geometric_low: float = knob(
        0.99,
        "With correction=geometric, masks episodes whose geometric mean of rho is smaller.",
        gt=0,
        lt=1,
    )
    geometric_high: float = knob(
        1.01,
        "With correction=geometric, masks episodes whose geometric mean of rho is larger.",
        gt=1,
    )
    m2_threshold: float = knob(
        0.04, "With correction=second_moment, bounds the batch mean of (log rho)^2.", gt=0, le=400
    )
    negative_mask_delta: float = knob(
        0.0,
        "Masks tokens with a negative advantage in episodes whose mean log(mu / pi) is larger. 0 "
        "turns it off.",
        ge=0,
    )
    proximal: Proximal = knob(
        Proximal.AUTO,
        "Selects the proximal policy, the denominator of the surrogate's ratio (decoupled PPO, "
        "arXiv:2110.00641).",
    )
    kl_coef: float = knob(
        0.0, "Sets the weight of KL(pi | reference). 0 loads no reference.", ge=0, le=1000
    )
    kl_estimator: KlEstimator = knob(
        KlEstimator.K3, "Selects Schulman's estimator of KL(pi | reference) from samples."
    )
    reference_path: str = knob(
        "", "Names the checkpoint of the reference policy. Empty means model.path."
    )
    drift_coef: float = knob(
        0.0, "Sets the weight of (log pi - log mu)^2 in the loss.", ge=0, le=1000
    )
    entropy_coef: float = knob(
        0.0, "Sets the weight of the entropy, which the loss maximises.", ge=0, le=1000
    )
    router_aux_coef: float = knob(
        0.0,
        "Sets the weight of the routers' load-balancing loss of a mixture of experts. The loss of "
        "a step is the mean over microbatches, so it depends on their size and layout. 0 turns it "
        "off.",
        ge=0,
        le=1000,
    )
    routing_replay: bool = knob(
        False,
        "Trains a mixture of experts with the experts that the engine chose while it sampled. The "
        "gates are the learner's own.",
    )
    filter_zero_variance: bool = knob(
        True, "Leaves out groups without signal, whose members have equal returns."
    )
    teacher: TeacherSection = field(default_factory=TeacherSection)

    @property
    def episode_ratios(self) -> list[tuple[str, object]]:
        """Keys with their values that compute a ratio over a whole episode."""
        ratios: list[tuple[str, object]] = []
        if self.policy_loss == PolicyLoss.GSPO:
            ratios.append(("algorithm.policy_loss", "gspo"))
        if self.correction in (Correction.SEQUENCE_TIS, Correction.GEOMETRIC):
            ratios.append(("algorithm.correction", str(self.correction)))
        if self.negative_mask_delta > 0:
            ratios.append(("algorithm.negative_mask_delta", self.negative_mask_delta))
        return ratios

    @property
    def is_group_relative(self) -> bool:
        """Whether a group has no signal if all its members have the same return."""
        return self.advantage in (Advantage.GRPO, Advantage.RLOO, Advantage.REINFORCE_PP_BASELINE)
