"""Options of the offline methods: DPO and AgentEvol (SFT is in `run_config.py`)."""

from dataclasses import dataclass

from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


@dataclass(slots=True, kw_only=True)
class DpoSection:
    """Direct preference optimisation on pairs of episodes of one item (arXiv:2305.18290)."""

    data: str = ""  # a run directory (its journal) or AgentTraj-format file with rewards
    output: str = "runs/dpo-policy"
    beta: float = 0.1
    sft_coef: float = 0.0  # of the chosen episode's mean negative log-likelihood (RPO)
    normalize_length: bool = False  # divide each episode's log-probability by its trained tokens
    min_gap: float = 0.5  # in reward, between chosen and rejected
    max_pairs_per_item: int = 4
    max_pairs: int = 0  # of all items together, drawn from the seed; 0: all
    batch_pairs: int = 16
    num_epochs: int = 1
    lr: float = 5e-7
    muon_lr: float = 3e-4  # learner.optimizer=muon: of the hidden matrices

    def __post_init__(self) -> None:
        _require(self.beta > 0, "dpo.beta", self.beta, "must be > 0")
        _require(self.sft_coef >= 0, "dpo.sft_coef", self.sft_coef, "must be >= 0")
        _require(0 < self.min_gap <= 1, "dpo.min_gap", self.min_gap, "in (0, 1]")
        _require(self.max_pairs >= 0, "dpo.max_pairs", self.max_pairs, "must be >= 0")
        for name in ("max_pairs_per_item", "batch_pairs", "num_epochs"):
            _require(getattr(self, name) > 0, f"dpo.{name}", getattr(self, name), "must be > 0")


@dataclass(slots=True, kw_only=True)
class EvolveSection:
    """AgentEvol: sample, keep what succeeded, train, again (arXiv:2406.04151)."""

    output: str = "runs/evolve-policy"
    num_iterations: int = 3
    items_per_iteration: int = 512  # training items, spread over the tasks by weight
    samples_per_item: int = 2
    min_reward: float = 1.0  # of an episode that is kept
    from_base: bool = True  # every iteration trains the first policy on all that was kept so far

    def __post_init__(self) -> None:
        for name in ("num_iterations", "items_per_iteration", "samples_per_item"):
            _require(getattr(self, name) > 0, f"evolve.{name}", getattr(self, name), "must be > 0")
