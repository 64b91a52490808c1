"""Options of learning: the objective, the controller and the trainer."""

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
    WeightsTransport,
)
from common.config.knobs import DEVICE, HOST, Contradiction, knob, seconds


class Advantage(StrEnum):
    """Estimator that turns rewards into advantages.

    grpo: reward minus the group's `baseline`, optionally divided by the group's standard deviation
    (arXiv:2402.03300). rloo: reward minus the mean of the other members (arXiv:2402.14740).
    reinforce_pp: whitened over all tokens of the batch (REINFORCE++, arXiv:2501.03262).
    reinforce_pp_baseline: reward minus the group's mean, then whitened as in reinforce_pp.
    ppo: a critic and generalised advantage estimation (arXiv:1707.06347, arXiv:1506.02438).
    running: reward minus a running mean of the item, for groups of one (arXiv:2509.13232).
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
    """Baseline of a group member's reward."""

    LEAVE_ONE_OUT = "leave_one_out"
    GROUP_MEAN = "group_mean"


class Aggregation(StrEnum):
    """Unit with equal weight in the loss.

    token: every sampled token. sequence: every episode. constant: every sampled token, but the sum
    is divided by episodes x `constant_tokens` instead of the number of tokens.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class CreditLevel(StrEnum):
    """Receiver of a reward or penalty: the whole episode, or its turn (and the turns before)."""

    EPISODE = "episode"
    TURN = "turn"


class StateCredit(StrEnum):
    """Credit of a turn, compared with the group's turns in the same state.

    none: no such credit. gigpo: the turn's return minus the mean return in that state, added to
    the episode's advantage (arXiv:2505.10978). ecpo: the same for its action, shrunk if few visits
    support it (arXiv:2606.05885). gagpo: GAE over turns with that mean as the state's value,
    instead of the episode's advantage (arXiv:2605.13217).
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
    """Importance weight from rho = pi_prox / mu, for data of other policies or precisions.

    none: 1. token_tis: min(rho, tis_cap). sequence_tis: min(product of rho, tis_cap) for all
    tokens of an episode. icepop: rho inside [mask_low, mask_high], else 0. geometric: 1 for an
    episode whose geometric mean of rho is inside [geometric_low, geometric_high], else 0.
    second_moment: 0 for the smallest set of tokens whose removal brings the batch mean of
    (log rho)^2 to m2_threshold or below, else 1 (M2PO). Its rho uses the policy before the step,
    which needs an additional forward pass.
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
    recomputed: one more forward pass before the updates. reused: the log-probabilities of a
    sample's first update. interpolated: between mu and pi by the token's lag, without a pass
    (A-3PO).
    """

    AUTO = "auto"
    SAMPLER = "sampler"
    RECOMPUTED = "recomputed"
    REUSED = "reused"
    INTERPOLATED = "interpolated"


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(pi | reference) from samples."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSection:
    """Reactions to data that is too far from the policy. Each is bounded, logged and optional.

    ESS is the minimum of three values: the effective sample size of pi / mu as a share of the
    tokens, the mean m of pi / mu, and 1 / m. It is 1 on-policy. The sample size alone would stay 1
    if all ratios shrank equally.
    """

    scale_lr: bool = knob(True, "learning rate x max(min_lr_scale, ESS / ess_target) below target")
    tighten_gate: bool = knob(True, "half as far ahead below ess_gate; one more above ess_target")
    skip_step: bool = knob(True, "below ess_skip nothing is learnt, the next batch must be fresh")
    ess_target: float = knob(0.9, "share of the tokens", ge=0, le=1)
    ess_gate: float = knob(0.7, "share of the tokens", ge=0, le=1)
    clip_gate: float = knob(0.1, "share of clipped tokens: likewise above; 1: never", ge=0, le=1)
    ess_skip: float = knob(0.5, "share of the tokens", ge=0, le=1)
    min_lr_scale: float = knob(0.1, "least factor of the learning rate", gt=0, le=1)
    recover_steps: int = knob(20, "steps above ess_target until the gate opens by one again", ge=1)
    max_skips: int = knob(3, "in a row; then the batch is trained on all the same", ge=0)
    masked_warn_frac: float = knob(0.05, "share of masked tokens that is warned of", ge=0, le=1)

    def contradictions(self) -> Iterator[Contradiction]:
        if not self.ess_skip <= self.ess_gate <= self.ess_target:
            yield "ess_target", self.ess_target, "ess_skip <= ess_gate <= it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The objective: advantages, the surrogate loss, and the correction for off-policy data."""

    advantage: Advantage = knob(Advantage.GRPO, "how a reward becomes an advantage")
    baseline: Baseline = knob(Baseline.LEAVE_ONE_OUT, "grpo: what a reward is compared with")
    normalize_std: bool = knob(False, "grpo: divide by the group's standard deviation")
    normalize_per_env: bool = knob(False, "divide by the deviation over an environment's tokens")
    aggregation: Aggregation = knob(Aggregation.TOKEN, "what weighs the same in the loss")
    constant_tokens: int = knob(512, "aggregation=constant: what an episode counts as", ge=1)
    reward_level: CreditLevel = knob(CreditLevel.EPISODE, "turn: each gets what follows it")
    turn_discount: float = knob(1.0, "per turn, of the outcome or of what follows", gt=0, le=1)
    state_credit: StateCredit = knob(StateCredit.NONE, "of turns taken in the same state")
    state_weight: float = knob(1.0, "gigpo, ecpo: of it beside the episode's", gt=0, le=1000)
    state_discount: float = knob(0.95, "of it: per turn, of what follows a turn", gt=0, le=1)
    state_prior: float = knob(1.0, "ecpo: visits that its shrinkage counts as", ge=0, le=1000)
    state_lambda: float = knob(0.95, "gagpo: of generalised advantage estimation", ge=0, le=1)
    running_memory: float = knob(0.9, "running: what a reward still counts at the next", ge=0, lt=1)
    running_prior: float = knob(2.0, "running: rewards that the task's mean counts as", gt=0)
    invalid_action_penalty: float = knob(
        0.0, "per invalid turn, or x their share", ge=-1000, le=1000
    )
    invalid_action_level: CreditLevel = knob(CreditLevel.EPISODE, "where that penalty lands")
    policy_loss: PolicyLoss = knob(PolicyLoss.PPO, "the surrogate")
    clip_low: float = knob(0.2, "how far below 1 the ratio counts", gt=0, lt=1)
    clip_high: float = knob(0.28, "how far above 1 the ratio counts", gt=0)
    dual_clip: float = knob(3.0, "bound of the loss where A < 0; 0: off", also=0, gt=1)
    dppo_delta: float = knob(0.2, "dppo: change of probability that masks a token", gt=0)
    correction: Correction = knob(Correction.TOKEN_TIS, "weight for data of other policies")
    tis_cap: float = knob(2.0, "largest weight of token_tis and sequence_tis", gt=0)
    mask_low: float = knob(0.5, "icepop: least weight", gt=0, lt=1)
    mask_high: float = knob(5.0, "icepop: largest weight", gt=1)
    geometric_low: float = knob(0.99, "geometric: least mean", gt=0, lt=1)
    geometric_high: float = knob(1.01, "geometric: largest mean", gt=1)
    m2_threshold: float = knob(0.04, "second_moment: most mean of (log rho)^2", gt=0, le=400)
    negative_mask_delta: float = knob(0.0, "masks A < 0 above this mean log(mu/pi); 0: off", ge=0)
    proximal: Proximal = knob(Proximal.AUTO, "the policy that the ratio is taken to")
    kl_coef: float = knob(0.0, "of KL(pi | reference); 0: none is loaded", ge=0, le=1000)
    kl_estimator: KlEstimator = knob(KlEstimator.K3, "of that KL from samples")
    reference_path: str = knob("", 'checkpoint of the reference; "": model.path')
    drift_coef: float = knob(0.0, "of (log pi - log mu)^2", ge=0, le=1000)
    entropy_coef: float = knob(0.0, "of the entropy, which is maximised", ge=0, le=1000)
    filter_zero_variance: bool = knob(True, "leave out groups whose rewards are all the same")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection:
    """The learner's optimizer, computation, checkpoints and publishing of weights."""

    host: str = knob("127.0.0.1", "address to listen on", form=HOST)
    port: int = knob(0, "of the trajectories; 0: a free one", ge=0, le=65535)
    advertise: str = knob("", 'host by which others reach it; "": found out', form=HOST, also="")
    device: str = knob("auto", "auto: CUDA if there is any", form=DEVICE)
    optimizer: OptimizerKind = knob(OptimizerKind.ADAMW, "of the policy")
    moments: Moments = knob(Moments.FP32, "AdamW's memory of gradients, of the critic, too")
    offload: Offload = knob(Offload.NONE, "keep it in the host's memory, for small GPUs: slower")
    lr: float = knob(1e-6, "learning rate", gt=0, le=10)
    muon_lr: float = knob(3e-3, "muon: rate of the hidden matrices, lr: the rest", gt=0, le=10)
    beta1: float = knob(0.9, "AdamW's memory of the gradient", ge=0, lt=1)
    beta2: float = knob(0.95, "AdamW's memory of the squared gradient", ge=0, lt=1)
    weight_decay: float = knob(0.01, "per step, times the learning rate", ge=0, le=100)
    warmup_steps: int = knob(10, "steps over which the learning rate rises", ge=0)
    decay_start_frac: float = knob(1.0, "of num_steps, until the linear decay begins", ge=0, le=1)
    min_lr_frac: float = knob(0.1, "of the learning rate, after its decay", ge=0, le=1)
    max_grad_norm: float = knob(1.0, "beyond which a gradient is scaled down", gt=0)
    ppo_epochs: int = knob(1, "passes over a batch", ge=1, le=1000)
    num_minibatches: int = knob(1, "updates of a pass", ge=1, le=10**5)
    max_tokens_per_microbatch: int = knob(8192, "of a forward and backward pass of one rank", ge=1)
    logprob_chunk_tokens: int = knob(1024, "rows of the vocabulary projection alive at once", ge=1)
    precision: Precision = knob(Precision.AUTO, "of the arithmetic; weights are kept in fp32")
    layout: Layout = knob(Layout.AUTO, "of the sequences of a microbatch")
    attention: Attention = knob(Attention.AUTO, "its kernels")
    shared_prefix: bool = knob(True, "packed: compute what a group's episodes begin with once")
    compile: bool = knob(False, "make one kernel each of norms and gates, at the first start")
    gradient_checkpointing: bool = knob(False, "less memory, a third more time")
    num_threads: int = knob(0, "CPU, of each rank; 0: as help, of spare cores", ge=0, le=1024)
    num_ranks: int = knob(
        1, "processes that share batches and weights; a CUDA device each", ge=1, le=4096
    )
    num_gpus: int = knob(0, "of all ranks: num_ranks, which 0 means", ge=0, le=4096)
    rank_timeout_s: float = seconds(600.0, "seconds in which ranks must answer each other", gt=0)
    max_lag_steps: int = knob(4, "of a trajectory's oldest token; more is stale", ge=0)
    hold_back_steps: int = knob(
        0, "steps that actors get weights late: a study", ge=0, must="be at most max_lag_steps"
    )
    batch_timeout_s: float = seconds(1800.0, "seconds to wait for a batch; then the run ends", gt=0)
    publish_timeout_s: float = seconds(120.0, "seconds to bring out a version", gt=0)
    publish_bucket_mb: int = knob(256, "MB of weights gathered and sent at a time", ge=1, le=65536)
    publish_parts: int = knob(
        1, "of the fleet that get a version one after the other", ge=1, le=10**4
    )
    weights_transport: WeightsTransport = knob(WeightsTransport.AUTO, "of versions to engines")
    max_canary_delta: float = knob(0.05, "mean |delta logprob| that alarms", gt=0, le=1000)
    max_canary_alarms: int = knob(3, "in a row before the run stops", ge=1)
    checkpoint_every_steps: int = knob(25, "steps between checkpoints", ge=1)
    checkpoint_every_s: float = seconds(
        900.0, "seconds after which there is one all the same", gt=0
    )
    max_redo_s: float = seconds(
        10.0, "seconds of steps to repeat after a death, where saving costs next to nothing", gt=0
    )
    keep_checkpoints: int = knob(3, "the newest of those made every so often", ge=1)
    max_bad_steps: int = knob(3, "non-finite losses in a row before the run stops", ge=1)
    lora: LoraSection = field(default_factory=LoraSection)
    critic: CriticSection = field(default_factory=CriticSection)
    controller: ControllerSection = field(default_factory=ControllerSection)

    def contradictions(self) -> Iterator[Contradiction]:
        if self.num_gpus and self.device == "cpu":
            yield "num_gpus", self.num_gpus, "learner.device=cpu uses none; give 0"
        if self.num_gpus not in (0, self.num_ranks):
            law = f"learner.num_ranks={self.num_ranks} take a GPU each; give that, or 0"
            yield "num_gpus", self.num_gpus, law
        if self.offload is Offload.OPTIMIZER and self.device == "cpu":
            yield "offload", "optimizer", "learner.device=cpu has it all in the host's; give none"
        if self.offload is Offload.OPTIMIZER and self.optimizer is OptimizerKind.MUON:
            law = "learner.optimizer=muon would multiply its matrices on the CPU; give adamw"
            yield "offload", "optimizer", law
        if self.offload is Offload.OPTIMIZER and self.moments is Moments.INT8:
            law = "learner.offload=optimizer updates them 600 times slower on a CPU; give fp32, or"
            yield "moments", "8bit", f"{law} offload=none"
        if self.lora.rank and self.optimizer is OptimizerKind.MUON:
            law = "learner.lora.rank > 0 needs adamw: muon is for whole updates, not their factors"
            yield "optimizer", "muon", law
        if self.moments is Moments.INT8 and self.optimizer is OptimizerKind.MUON:
            law = "learner.optimizer=muon keeps one moment, in fp32; give fp32, or optimizer=adamw"
            yield "moments", "8bit", law
