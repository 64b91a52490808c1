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

    scale_lr: bool = knob(
        True, "Scales the learning rate down while the effective sample size is below ess_target."
    )
    tighten_gate: bool = knob(
        True, "Halves max_ahead_steps below ess_gate, and raises it again above ess_target."
    )
    skip_step: bool = knob(True, "Skips the step below ess_skip; the next batch must be fresh.")
    ess_target: float = knob(
        0.9,
        "Share of tokens: below this effective sample size the learning rate is scaled down.",
        ge=0,
        le=1,
    )
    ess_gate: float = knob(
        0.7,
        "Share of tokens: below this effective sample size max_ahead_steps is halved.",
        ge=0,
        le=1,
    )
    clip_gate: float = knob(
        0.1,
        "Share of clipped tokens: above it max_ahead_steps is halved. 1 turns this off.",
        ge=0,
        le=1,
    )
    ess_skip: float = knob(
        0.5, "Share of tokens: below this effective sample size the step is skipped.", ge=0, le=1
    )
    min_lr_scale: float = knob(
        0.1, "The controller never scales the learning rate by less than this factor.", gt=0, le=1
    )
    recover_steps: int = knob(
        20, "The gate opens by one after this many steps above ess_target.", ge=1
    )
    max_skips: int = knob(
        3, "After this many skipped steps in a row the batch is trained on.", ge=0
    )
    masked_warn_frac: float = knob(
        0.05, "Share of masked tokens: above it the learner logs a warning.", ge=0, le=1
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if not self.ess_skip <= self.ess_gate <= self.ess_target:
            yield "ess_target", self.ess_target, "ess_skip <= ess_gate <= it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The objective: advantages, the surrogate loss, and the correction for off-policy data."""

    advantage: Advantage = knob(Advantage.GRPO, "Selects how rewards become advantages.")
    baseline: Baseline = knob(
        Baseline.LEAVE_ONE_OUT, "With advantage=grpo, selects the baseline of a reward."
    )
    normalize_std: bool = knob(
        False, "With advantage=grpo, divides advantages by the group's standard deviation."
    )
    normalize_per_env: bool = knob(
        False, "Divides advantages by their standard deviation over the tokens of an environment."
    )
    aggregation: Aggregation = knob(
        Aggregation.TOKEN,
        "Selects the unit that has equal weight in the loss: a token, a sequence or a prompt.",
    )
    constant_tokens: int = knob(
        512, "With aggregation=constant, an episode counts as this many tokens.", ge=1
    )
    reward_level: CreditLevel = knob(
        CreditLevel.EPISODE, "With `turn`, each turn is credited with the rewards that follow it."
    )
    turn_discount: float = knob(
        1.0,
        "Discounts the outcome, or the rewards that follow, by this factor per turn.",
        gt=0,
        le=1,
    )
    state_credit: StateCredit = knob(
        StateCredit.NONE, "Selects the credit of turns that were taken in the same state."
    )
    state_weight: float = knob(
        1.0,
        "With gigpo or ecpo, weight of the credit by state beside the episode's advantage.",
        gt=0,
        le=1000,
    )
    state_discount: float = knob(
        0.95,
        "Discounts the rewards that follow a turn in the credit by state, per turn.",
        gt=0,
        le=1,
    )
    state_prior: float = knob(
        1.0, "With ecpo, the shrinkage counts as this many visits of a state.", ge=0, le=1000
    )
    state_lambda: float = knob(
        0.95, "With gagpo, sets lambda of generalised advantage estimation.", ge=0, le=1
    )
    running_memory: float = knob(
        0.9,
        "With advantage=running, a reward keeps this share of its weight at the next one.",
        ge=0,
        lt=1,
    )
    running_prior: float = knob(
        2.0, "With advantage=running, the task's mean counts as this many rewards.", gt=0
    )
    invalid_action_penalty: float = knob(
        0.0,
        "Penalty of an invalid turn, or of the share of invalid turns in an episode.",
        ge=-1000,
        le=1000,
    )
    invalid_action_level: CreditLevel = knob(
        CreditLevel.EPISODE,
        "Selects whether the penalty is credited to the turn or to the episode.",
    )
    policy_loss: PolicyLoss = knob(PolicyLoss.PPO, "Selects the surrogate loss of the policy.")
    clip_low: float = knob(0.2, "Clips the ratio at 1 minus this value.", gt=0, lt=1)
    clip_high: float = knob(0.28, "Clips the ratio at 1 plus this value.", gt=0)
    dual_clip: float = knob(
        3.0,
        "Bounds the loss of negative advantages at this multiple. 0 turns it off.",
        also=0,
        gt=1,
    )
    dppo_delta: float = knob(
        0.2,
        "With policy_loss=dppo, masks a token whose probability changed by more than this.",
        gt=0,
    )
    correction: Correction = knob(
        Correction.TOKEN_TIS, "Selects the importance weights of off-policy data."
    )
    tis_cap: float = knob(2.0, "Caps the weights of token_tis and sequence_tis.", gt=0)
    mask_low: float = knob(
        0.5, "With correction=icepop, masks tokens with a smaller weight.", gt=0, lt=1
    )
    mask_high: float = knob(5.0, "With correction=icepop, masks tokens with a larger weight.", gt=1)
    geometric_low: float = knob(
        0.99, "With correction=geometric, masks sequences with a smaller mean ratio.", gt=0, lt=1
    )
    geometric_high: float = knob(
        1.01, "With correction=geometric, masks sequences with a larger mean ratio.", gt=1
    )
    m2_threshold: float = knob(
        0.04, "With correction=second_moment, bounds the mean of (log rho)^2.", gt=0, le=400
    )
    negative_mask_delta: float = knob(
        0.0, "Masks negative advantages above this mean of log(mu / pi). 0 turns it off.", ge=0
    )
    proximal: Proximal = knob(Proximal.AUTO, "Selects the policy that the ratio is taken to.")
    kl_coef: float = knob(0.0, "Weight of KL(pi | reference). 0 loads no reference.", ge=0, le=1000)
    kl_estimator: KlEstimator = knob(
        KlEstimator.K3, "Selects the estimator of that KL from samples."
    )
    reference_path: str = knob("", "Checkpoint of the reference policy. Empty means model.path.")
    drift_coef: float = knob(0.0, "Weight of (log pi - log mu)^2 in the loss.", ge=0, le=1000)
    entropy_coef: float = knob(0.0, "Weight of the entropy, which is maximised.", ge=0, le=1000)
    filter_zero_variance: bool = knob(True, "Leaves out groups whose rewards are all equal.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection:
    """The learner's optimizer, computation, checkpoints and publishing of weights."""

    host: str = knob("127.0.0.1", "Address at which the learner listens.", form=HOST)
    port: int = knob(0, "Port that receives trajectories. 0 chooses a free one.", ge=0, le=65535)
    advertise: str = knob(
        "",
        "Host name by which other nodes reach the learner. Empty detects it.",
        form=HOST,
        also="",
    )
    device: str = knob(
        "auto", "Device of the learner. `auto` uses CUDA if there is any.", form=DEVICE
    )
    optimizer: OptimizerKind = knob(OptimizerKind.ADAMW, "Selects the optimizer of the policy.")
    moments: Moments = knob(
        Moments.FP32, "Selects the precision of AdamW's moments, also for the critic."
    )
    offload: Offload = knob(
        Offload.NONE, "Keeps weights or moments in host memory, for small GPUs. Steps take longer."
    )
    lr: float = knob(1e-6, "Sets the learning rate of AdamW.", gt=0, le=10)
    muon_lr: float = knob(
        3e-3,
        "With optimizer=muon, learning rate of the hidden matrices. The rest uses lr.",
        gt=0,
        le=10,
    )
    beta1: float = knob(0.9, "Sets AdamW's decay of the first moment.", ge=0, lt=1)
    beta2: float = knob(0.95, "Sets AdamW's decay of the second moment.", ge=0, lt=1)
    weight_decay: float = knob(
        0.01, "Decays the weights per step by this factor times the learning rate.", ge=0, le=100
    )
    warmup_steps: int = knob(10, "The learning rate rises over this many steps.", ge=0)
    decay_start_frac: float = knob(
        1.0, "The linear decay begins at this share of train.num_steps.", ge=0, le=1
    )
    min_lr_frac: float = knob(
        0.1, "The learning rate decays to this share of its value.", ge=0, le=1
    )
    max_grad_norm: float = knob(1.0, "Scales a gradient down to this norm if it is larger.", gt=0)
    ppo_epochs: int = knob(1, "Passes over each batch.", ge=1, le=1000)
    num_minibatches: int = knob(
        1, "Each pass over a batch makes this many updates.", ge=1, le=10**5
    )
    max_tokens_per_microbatch: int = knob(
        8192, "Limits the tokens of a forward and backward pass of one rank.", ge=1
    )
    logprob_chunk_tokens: int = knob(
        1024, "Computes the vocabulary projection for this many tokens at a time.", ge=1
    )
    precision: Precision = knob(
        Precision.AUTO, "Selects the precision of the arithmetic. Weights are kept in fp32."
    )
    layout: Layout = knob(
        Layout.AUTO, "Selects whether the sequences of a microbatch are packed or padded."
    )
    attention: Attention = knob(Attention.AUTO, "Selects the attention kernels.")
    shared_prefix: bool = knob(
        True, "With packed layout, computes the common prefix of a group's episodes once."
    )
    compile: bool = knob(False, "Compiles norms and gated layers into kernels at the first start.")
    gradient_checkpointing: bool = knob(
        False, "Recomputes activations: less memory, a third more time."
    )
    num_threads: int = knob(0, "CPU threads of each rank. 0 uses spare cores.", ge=0, le=1024)
    num_ranks: int = knob(
        1,
        "Processes that share batches and weights, each with a CUDA device of its own.",
        ge=1,
        le=4096,
    )
    num_gpus: int = knob(
        0, "Number of the learner's GPUs over all ranks. 0 means one for each rank.", ge=0, le=4096
    )
    rank_timeout_s: float = seconds(600.0, "Seconds in which ranks must answer each other.", gt=0)
    max_lag_steps: int = knob(
        4, "Trajectories whose oldest token is older than this many versions are stale.", ge=0
    )
    hold_back_steps: int = knob(
        0,
        "Publishes weights this many steps late, for studies of staleness.",
        ge=0,
        must="be at most max_lag_steps",
    )
    batch_timeout_s: float = seconds(
        1800.0, "The run ends if no batch is complete within these seconds.", gt=0
    )
    publish_timeout_s: float = seconds(120.0, "Seconds in which a version must be published.", gt=0)
    publish_bucket_mb: int = knob(
        256, "MB of weights that are gathered and sent at a time.", ge=1, le=65536
    )
    publish_parts: int = knob(
        1,
        "Divides the fleet into this many parts, which get a version one after another.",
        ge=1,
        le=10**4,
    )
    weights_transport: WeightsTransport = knob(
        WeightsTransport.AUTO, "Selects the transport of versions to engines."
    )
    max_canary_delta: float = knob(
        0.05, "Alarms if the mean |delta logprob| of the canary prompts is larger.", gt=0, le=1000
    )
    max_canary_alarms: int = knob(3, "The run stops after this many alarms in a row.", ge=1)
    checkpoint_every_steps: int = knob(25, "Writes a checkpoint every this many steps.", ge=1)
    checkpoint_every_s: float = seconds(
        900.0, "Writes a checkpoint at least every this many seconds.", gt=0
    )
    max_redo_s: float = seconds(
        10.0,
        "Writes checkpoints early if they are cheap and a restart would repeat more seconds.",
        gt=0,
    )
    keep_checkpoints: int = knob(3, "Keeps this many of the newest regular checkpoints.", ge=1)
    max_bad_steps: int = knob(3, "The run stops after this many non-finite losses in a row.", ge=1)
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
