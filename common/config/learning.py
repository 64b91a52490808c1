"""Options of learning: the objective and the trainer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from common.config.compute import (
    Attention,
    CriticSection,
    Layout,
    LoraSection,
    Moments,
    Offload,
    OptimizerKind,
    Precision,
    PublishMode,
    RankKeys,
    WeightsTransport,
)
from common.config.controller import ControllerSection
from common.config.knobs import DEVICE, HOST, Contradiction, knob, seconds
from common.config.teaching.teacher import TeacherSection


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

    @property
    def is_group_relative(self) -> bool:
        """Whether a group has no signal if all its members have the same return."""
        return self in (Advantage.GRPO, Advantage.RLOO, Advantage.REINFORCE_PP_BASELINE)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The objective: advantages, the surrogate loss, and the correction for off-policy data."""

    advantage: Advantage = knob(
        Advantage.GRPO, "Selects the estimator that turns rewards into advantages."
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
    policy_loss: PolicyLoss = knob(PolicyLoss.PPO, "Selects the surrogate loss of the policy.")
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
    correction: Correction = knob(
        Correction.TOKEN_TIS,
        "Selects the importance weight of a sampled token. It corrects for data of other policies "
        "or precisions.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection(RankKeys):
    """The learner's optimizer, computation, checkpoints and publishing of weights."""

    host: str = knob("127.0.0.1", "Sets the address at which the learner listens.", form=HOST)
    port: int = knob(
        0, "Sets the port that receives trajectories. 0 chooses a free one.", ge=0, le=65535
    )
    advertise: str = knob(
        "",
        "Sets the host name by which other nodes reach the learner. Empty detects it.",
        form=HOST,
        also="",
    )
    device: str = knob(
        "auto", "Selects the device of the learner. `auto` uses CUDA if there is any.", form=DEVICE
    )
    optimizer: OptimizerKind = knob(OptimizerKind.ADAMW, "Selects the optimizer of the policy.")
    moments: Moments = knob(
        Moments.FP32,
        "Selects the number format of AdamW's two moments of the gradient, also for the critic.",
    )
    offload: Offload = knob(
        Offload.NONE,
        "Selects whether a GPU learner keeps weights, gradients and moments in host memory. Steps "
        "then take longer.",
    )
    lr: float = knob(1e-6, "Sets the learning rate of AdamW.", gt=0, le=10)
    muon_lr: float = knob(
        3e-3,
        "With optimizer=muon, sets the learning rate of the hidden matrices. All other weights use"
        " learner.lr.",
        gt=0,
        le=10,
    )
    beta1: float = knob(0.9, "Sets AdamW's decay of the first moment.", ge=0, lt=1)
    beta2: float = knob(0.95, "Sets AdamW's decay of the second moment.", ge=0, lt=1)
    weight_decay: float = knob(
        0.01,
        "Decays the policy's matrices, and all weights of a critic, per update by this factor "
        "times their learning rate. Norms and biases of the policy do not decay.",
        ge=0,
        le=100,
    )
    warmup_steps: int = knob(
        10, "Raises the learning rate to its value over this many first steps.", ge=0
    )
    decay_start_frac: float = knob(
        1.0,
        "Begins the linear decay of the learning rate at this share of train.num_steps. 1 turns it"
        " off.",
        ge=0,
        le=1,
    )
    min_lr_frac: float = knob(
        0.1, "Decays the learning rate to this share of its value.", ge=0, le=1
    )
    max_grad_norm: float = knob(1.0, "Scales a gradient down to this norm if it is larger.", gt=0)
    ppo_epochs: int = knob(1, "Passes over each batch this many times.", ge=1, le=1000)
    num_minibatches: int = knob(
        1, "Makes this many updates in each pass over a batch.", ge=1, le=10**5
    )
    max_tokens_per_microbatch: int = knob(
        8192, "Limits the tokens of a forward and backward pass of one rank.", ge=1
    )
    logprob_chunk_tokens: int = knob(
        1024, "Computes the vocabulary projection for this many tokens at a time.", ge=1
    )
    precision: Precision = knob(
        Precision.AUTO,
        "Selects the precision of the forward and backward passes. The master weights are fp32.",
    )
    layout: Layout = knob(
        Layout.AUTO,
        "Selects a microbatch's memory layout. The gradient does not depend on it, except for "
        "rounding and the term of algorithm.router_aux_coef.",
    )
    attention: Attention = knob(Attention.AUTO, "Selects the attention kernels of the learner.")
    shared_prefix: bool = knob(
        True, "With the packed layout, computes the common prefix of a group's episodes once."
    )
    compile: bool = knob(
        False,
        "Compiles norms and gated layers into kernels at the first start. It is off on CUDA too: "
        "no measurement has shown a gain there yet.",
    )
    gradient_checkpointing: bool = knob(
        False,
        "Recomputes activations in the backward pass. A step takes less memory and a third more "
        "time.",
    )
    num_threads: int = knob(
        0, "Sets the CPU threads of each rank. 0 uses spare cores.", ge=0, le=1024
    )
    max_lag_steps: int = knob(
        4,
        "Limits the lag of a trajectory's oldest token. Older trajectories are stale. "
        "scheduler.max_stretch may widen the limit for long episodes.",
        ge=0,
    )
    hold_back_steps: int = knob(
        0,
        "Publishes weights this many steps late, for studies of staleness.",
        ge=0,
        must="be at most max_lag_steps",
    )
    batch_timeout_s: float = seconds(
        1800.0,
        "Logs an error if no batch is complete and no episode has arrived for these seconds. The "
        "learner then waits on, or ends with run.on_stall=stop.",
        gt=0,
    )
    publish_timeout_s: float = seconds(
        120.0, "Limits the seconds in which a version must be published.", gt=0
    )
    publish_bucket_mb: int = knob(
        256, "Gathers and sends this many MB of weights at a time.", ge=1, le=65536
    )
    publish_parts: int = knob(
        1,
        "Divides the engines into this many parts, which receive a version one after another.",
        ge=1,
        le=10**4,
    )
    publish: PublishMode = knob(PublishMode.FULL, "Selects the form of the versions that are sent.")
    weights_transport: WeightsTransport = knob(
        WeightsTransport.AUTO, "Selects the transport of weight versions to the engines."
    )
    max_canary_delta: float = knob(
        0.05,
        "Scales the limit of the canary prompts' mean |delta logprob|. The limit is 4 times the "
        "engine's first differences, but at least 0.4 times and at most 4 times this value.",
        gt=0,
        le=1000,
    )
    max_canary_alarms: int = knob(3, "Ends the run after this many canary alarms in a row.", ge=1)
    checkpoint_every_steps: int = knob(25, "Writes a checkpoint every this many steps.", ge=1)
    checkpoint_every_s: float = seconds(
        900.0, "Writes a checkpoint at least every this many seconds.", gt=0
    )
    max_redo_s: float = seconds(
        10.0,
        "Writes a checkpoint early, if it is cheap, once a restart would repeat this many seconds.",
        gt=0,
    )
    keep_checkpoints: int = knob(3, "Keeps this many of the newest regular checkpoints.", ge=1)
    max_bad_steps: int = knob(
        3, "Ends the run after this many steps in a row with non-finite losses or gradients.", ge=1
    )
    lora: LoraSection = field(default_factory=LoraSection)
    critic: CriticSection = field(default_factory=CriticSection)
    controller: ControllerSection = field(default_factory=ControllerSection)

    @property
    def row_tokens(self) -> int:
        """The token limit of a microbatch, over all ranks that compute it together."""
        return self.max_tokens_per_microbatch * self.sequence_ranks

    def contradictions(self) -> Iterator[Contradiction]:
        if self.num_gpus and self.device == "cpu":
            yield "num_gpus", self.num_gpus, "must be 0 with learner.device=cpu, which uses no GPU"
        yield from self.rank_contradictions()
        if self.sequence_ranks > 1 and self.layout is Layout.PADDED:
            law = "must be packed or auto with sequence_ranks > 1, which divides packed rows"
            yield "layout", "padded", law
        if self.offload is Offload.OPTIMIZER and self.device == "cpu":
            law = "must be none with learner.device=cpu, which uses host memory only"
            yield "offload", "optimizer", law
        if self.offload is Offload.OPTIMIZER and self.optimizer is OptimizerKind.MUON:
            law = "needs learner.optimizer=adamw: muon would multiply its matrices on the CPU"
            yield "offload", "optimizer", law
        if self.offload is Offload.OPTIMIZER and self.moments is Moments.INT8:
            law = "must be fp32 with learner.offload=optimizer: a CPU updates 8-bit moments 600"
            yield "moments", "8bit", f"{law} times slower"
        if self.lora.is_merged and (self.num_ranks > 1 or self.offload is Offload.OPTIMIZER):
            law = "must not name experts with num_ranks > 1 or offload=optimizer"
            yield "lora.targets", ",".join(self.lora.targets), law
        if self.lora.rank and self.optimizer is OptimizerKind.MUON:
            law = "must be adamw with learner.lora.rank > 0: muon is for whole weight matrices"
            yield "optimizer", "muon", law
        if self.moments is Moments.INT8 and self.optimizer is OptimizerKind.MUON:
            law = "must be fp32 with learner.optimizer=muon, which keeps one moment in fp32"
            yield "moments", "8bit", law
