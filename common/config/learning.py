"""Options of learning: the objective, the critic, the controller and the trainer."""

from dataclasses import dataclass, field
from enum import StrEnum

from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


class OptimizerKind(StrEnum):
    """adamw: on everything. muon: Muon on the hidden matrices, AdamW on the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class Advantage(StrEnum):
    """How a reward becomes an advantage.

    grpo: less the group's `baseline`, optionally over its standard deviation (arXiv:2402.03300).
    rloo: less the mean of the other members (arXiv:2402.14740).
    reinforce_pp: whitened over all tokens of the batch (REINFORCE++, arXiv:2501.03262).
    reinforce_pp_baseline: less the group's mean, then whitened likewise.
    ppo: a critic and generalised advantage estimation (arXiv:1707.06347, arXiv:1506.02438).
    """

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    PPO = "ppo"

    @property
    def is_group_relative(self) -> bool:
        """True if a group whose members are worth the same teaches nothing."""
        return self in (Advantage.GRPO, Advantage.RLOO, Advantage.REINFORCE_PP_BASELINE)


class Baseline(StrEnum):
    """What a group member's reward is compared with."""

    LEAVE_ONE_OUT = "leave_one_out"
    GROUP_MEAN = "group_mean"


class Aggregation(StrEnum):
    """What weighs the same in the loss.

    token: every sampled token. sequence: every episode. constant: every token again, but divided
    by episodes x `constant_tokens` instead of by the tokens there are.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class CreditLevel(StrEnum):
    """Where a reward or penalty lands: on the whole episode, or on its turn (and those before)."""

    EPISODE = "episode"
    TURN = "turn"


class PolicyLoss(StrEnum):
    """The surrogate.

    ppo: clipped ratio per token. gspo: clipped ratio per sequence (arXiv:2507.18071).
    cispo: clipped, detached ratio as a weight of log pi (arXiv:2506.13585).
    dppo: plain ratio; tokens whose probability already moved too far the right way are masked.
    """

    PPO = "ppo"
    GSPO = "gspo"
    CISPO = "cispo"
    DPPO = "dppo"


class Correction(StrEnum):
    """What rho = pi_prox / mu becomes, the weight for data of other policies and arithmetics.

    none: 1. token_tis: min(rho, tis_cap). sequence_tis: min(product of rho, tis_cap) for all
    tokens of an episode. icepop: rho inside [mask_low, mask_high], else 0. geometric: 1 for an
    episode whose geometric mean of rho is inside [geometric_low, geometric_high], else 0.
    """

    NONE = "none"
    TOKEN_TIS = "token_tis"
    SEQUENCE_TIS = "sequence_tis"
    ICEPOP = "icepop"
    GEOMETRIC = "geometric"


class Proximal(StrEnum):
    """The policy that the ratio of the surrogate is taken to (decoupled PPO, arXiv:2110.00641).

    auto: sampler if a batch makes one update, else recomputed. sampler: mu itself. recomputed: one
    more forward pass before the updates. reused: the log-probabilities of a sample's first update.
    interpolated: between mu and pi by the token's lag, without a pass (A-3PO).
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


class CriticKind(StrEnum):
    """head: a value head on the policy's trunk. model: a network of its own."""

    HEAD = "head"
    MODEL = "model"


class CriticTargets(StrEnum):
    """gae: returns of the data's policy. vtrace: corrected to the current one (1802.01561)."""

    GAE = "gae"
    VTRACE = "vtrace"


class Timestep(StrEnum):
    """What one step of advantage estimation is; observation tokens are never one."""

    TURN = "turn"
    TOKEN = "token"


@dataclass(slots=True, kw_only=True)
class CriticSection:
    """The value function of `algorithm.advantage=ppo`."""

    kind: CriticKind = CriticKind.HEAD
    path: str = ""  # kind=model: checkpoint to start from; "": model.path
    lr: float = 1e-5  # of the head, or of the model
    coef: float = 0.5  # kind=head: weight of the value loss beside the policy loss
    clip: float = 0.2  # how far a value may move from that before the step; 0: freely
    warmup_steps: int = 0  # first steps in which only the critic learns
    gae_lambda: float = 1.0
    timestep: Timestep = Timestep.TURN
    targets: CriticTargets = CriticTargets.GAE
    vtrace_rho: float = 1.0
    vtrace_c: float = 1.0
    whiten: bool = True  # advantages of the batch to mean 0 and standard deviation 1

    def __post_init__(self) -> None:
        _require(self.lr > 0, "learner.critic.lr", self.lr, "must be > 0")
        _require(self.coef >= 0, "learner.critic.coef", self.coef, "must be >= 0")
        _require(self.clip >= 0, "learner.critic.clip", self.clip, "must be >= 0")
        _require(
            0 <= self.gae_lambda <= 1, "learner.critic.gae_lambda", self.gae_lambda, "in [0, 1]"
        )
        _require(self.vtrace_rho > 0, "learner.critic.vtrace_rho", self.vtrace_rho, "must be > 0")
        _require(self.vtrace_c > 0, "learner.critic.vtrace_c", self.vtrace_c, "must be > 0")


@dataclass(slots=True, kw_only=True)
class ControllerSection:
    """Reactions to data that is too far from the policy; each bounded, logged and switchable.

    ESS is the effective sample size of pi / mu as a share of the tokens, 1 on-policy.
    """

    scale_lr: bool = True  # learning rate x max(min_lr_scale, ESS / ess_target) below the target
    tighten_gate: bool = True  # one step less ahead below ess_gate; slowly back above ess_target
    skip_step: bool = True  # below ess_skip nothing is learnt, and the next batch must be fresh
    ess_target: float = 0.9
    ess_gate: float = 0.7
    ess_skip: float = 0.5
    min_lr_scale: float = 0.1
    recover_steps: int = 20  # steps above ess_target after which the gate opens by one again
    max_skips: int = 3  # in a row; then the batch is trained on all the same
    masked_warn_frac: float = 0.05  # share of masked tokens that is worth a warning

    def __post_init__(self) -> None:
        ok = 0 <= self.ess_skip <= self.ess_gate <= self.ess_target <= 1
        _require(
            ok, "learner.controller.ess_target", self.ess_target, "ess_skip <= ess_gate <= it <= 1"
        )
        _require(
            0 < self.min_lr_scale <= 1,
            "learner.controller.min_lr_scale",
            self.min_lr_scale,
            "(0, 1]",
        )
        _require(
            self.recover_steps > 0, "learner.controller.recover_steps", self.recover_steps, "> 0"
        )
        _require(self.max_skips >= 0, "learner.controller.max_skips", self.max_skips, ">= 0")


@dataclass(slots=True, kw_only=True)
class AlgorithmSection:
    """The objective: advantages, the surrogate, and the correction for other policies' data."""

    advantage: Advantage = Advantage.GRPO
    baseline: Baseline = Baseline.LEAVE_ONE_OUT  # grpo
    normalize_std: bool = False  # grpo: divide by the group's standard deviation
    normalize_per_env: bool = False  # divide by the standard deviation over an environment's tokens
    aggregation: Aggregation = Aggregation.TOKEN
    constant_tokens: int = 512  # aggregation=constant: what an episode counts as
    reward_level: CreditLevel = CreditLevel.EPISODE  # turn: a turn is credited with what follows
    turn_discount: float = 1.0  # per turn: of the outcome at episode level, of what follows at turn
    invalid_action_penalty: float = 0.0  # per invalid turn, or times their share of the episode
    invalid_action_level: CreditLevel = CreditLevel.EPISODE
    policy_loss: PolicyLoss = PolicyLoss.PPO
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0  # bound of the loss where the advantage is negative; 0: off
    dppo_delta: float = 0.2  # dppo: change of probability beyond which a token is masked
    correction: Correction = Correction.TOKEN_TIS
    tis_cap: float = 2.0
    mask_low: float = 0.5
    mask_high: float = 5.0
    geometric_low: float = 0.99
    geometric_high: float = 1.01
    negative_mask_delta: float = 0.0  # mask A < 0 where mean log(mu/pi) exceeds it; 0: off
    proximal: Proximal = Proximal.AUTO
    kl_coef: float = 0.0  # of KL(pi | reference); the reference is loaded only if it is not 0
    kl_estimator: KlEstimator = KlEstimator.K3
    reference_path: str = ""  # checkpoint of the reference; "": model.path
    drift_coef: float = 0.0  # of (log pi - log mu)^2
    entropy_coef: float = 0.0
    filter_zero_variance: bool = True

    def __post_init__(self) -> None:
        _require(0 < self.clip_low < 1, "algorithm.clip_low", self.clip_low, "in (0, 1)")
        _require(self.clip_high > 0, "algorithm.clip_high", self.clip_high, "must be > 0")
        discount = self.turn_discount
        _require(0 < discount <= 1, "algorithm.turn_discount", discount, "in (0, 1]")
        is_valid = self.dual_clip == 0 or self.dual_clip > 1
        _require(is_valid, "algorithm.dual_clip", self.dual_clip, "0 (off) or > 1")
        _require(self.tis_cap > 0, "algorithm.tis_cap", self.tis_cap, "> 0; correction=none: off")
        ok = 0 < self.mask_low < 1 < self.mask_high
        _require(ok, "algorithm.mask_low", self.mask_low, "mask_low < 1 < mask_high")
        ok = 0 < self.geometric_low < 1 < self.geometric_high
        _require(ok, "algorithm.geometric_low", self.geometric_low, "below 1, geometric_high above")
        _require(self.constant_tokens > 0, "algorithm.constant_tokens", self.constant_tokens, "> 0")
        _require(self.dppo_delta > 0, "algorithm.dppo_delta", self.dppo_delta, "must be > 0")
        for name in ("kl_coef", "drift_coef", "entropy_coef", "negative_mask_delta"):
            _require(getattr(self, name) >= 0, f"algorithm.{name}", getattr(self, name), ">= 0")


@dataclass(slots=True, kw_only=True)
class LearnerSection:
    """The trainer."""

    host: str = "127.0.0.1"
    port: int = 0  # inbox; 0: a free one
    device: str = "auto"  # auto | cpu | cuda
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    lr: float = 1e-6
    muon_lr: float = 3e-3  # optimizer=muon: rate of the hidden matrices, `lr` for the rest
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    warmup_steps: int = 10
    decay_start_frac: float = 1.0  # of num_steps, where a linear decay to min_lr_frac begins
    min_lr_frac: float = 0.1
    max_grad_norm: float = 1.0
    ppo_epochs: int = 1
    num_minibatches: int = 1
    max_tokens_per_microbatch: int = 8192
    logprob_chunk_tokens: int = 1024  # rows of the vocabulary projection alive at once
    autocast: bool = True  # bf16 compute over fp32 master weights
    gradient_checkpointing: bool = False
    num_threads: int = 1  # CPU only; of each rank
    num_ranks: int = 1  # processes that share each batch; on CUDA one device each, from the first
    rank_timeout_s: float = 600.0  # within which the ranks must answer each other
    max_lag_steps: int = 4  # oldest token of a trajectory; beyond it the episode is stale
    hold_back_steps: int = 0  # weights reach the actors so many steps late: to study staleness
    batch_timeout_s: float = 1800.0  # without a batch the run ends with who is waited for
    publish_timeout_s: float = 120.0
    max_canary_delta: float = 0.05  # mean |delta logprob| between engine and trainer: alarm
    max_canary_alarms: int = 3  # in a row before the run stops
    checkpoint_every_steps: int = 25
    checkpoint_every_s: float = 900.0
    keep_checkpoints: int = 3
    max_bad_steps: int = 3  # non-finite losses in a row before the run stops
    critic: CriticSection = field(default_factory=CriticSection)
    controller: ControllerSection = field(default_factory=ControllerSection)

    def __post_init__(self) -> None:
        _require(self.lr > 0, "learner.lr", self.lr, "must be > 0")
        _require(self.max_lag_steps >= 0, "learner.max_lag_steps", self.max_lag_steps, ">= 0")
        law = "must be between 0 and learner.max_lag_steps"
        is_bounded = 0 <= self.hold_back_steps <= self.max_lag_steps
        _require(is_bounded, "learner.hold_back_steps", self.hold_back_steps, law)
        _require(self.num_ranks >= 1, "learner.num_ranks", self.num_ranks, "must be >= 1")
        _require(self.rank_timeout_s > 0, "learner.rank_timeout_s", self.rank_timeout_s, "> 0")
        _require(self.num_minibatches >= 1, "learner.num_minibatches", self.num_minibatches, ">= 1")
        _require(self.ppo_epochs >= 1, "learner.ppo_epochs", self.ppo_epochs, "must be >= 1")
