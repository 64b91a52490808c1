"""The algorithms by their names in the configuration, and functions of the user."""

from typing import Any

from common.config.algorithm import Advantage, AlgorithmSection, Correction, PolicyLoss
from learner.algorithms import critic
from learner.algorithms.cispo import CISPO
from learner.algorithms.dppo import DPPO
from learner.algorithms.grpo import GRPO, RLOO
from learner.algorithms.gspo import GSPO, TURN
from learner.algorithms.icepop import GEOMETRIC, ICEPOP
from learner.algorithms.interface import Estimator, Surrogate, Weight
from learner.algorithms.m2po import SECOND_MOMENT, UNCLIPPED
from learner.algorithms.ppo import PPO
from learner.algorithms.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from learner.algorithms.running import RUNNING
from learner.algorithms.tis import NONE, SEQUENCE_TIS, TOKEN_TIS

SURROGATES = {
    PolicyLoss.PPO: PPO,
    PolicyLoss.GSPO: GSPO,
    PolicyLoss.CISPO: CISPO,
    PolicyLoss.DPPO: DPPO,
    PolicyLoss.TURN: TURN,
    PolicyLoss.UNCLIPPED: UNCLIPPED,
}
WEIGHTS = {
    Correction.NONE: NONE,
    Correction.TOKEN_TIS: TOKEN_TIS,
    Correction.SEQUENCE_TIS: SEQUENCE_TIS,
    Correction.ICEPOP: ICEPOP,
    Correction.GEOMETRIC: GEOMETRIC,
    Correction.SECOND_MOMENT: SECOND_MOMENT,
}
ESTIMATORS = {
    Advantage.GRPO: GRPO,
    Advantage.RLOO: RLOO,
    Advantage.REINFORCE_PP: REINFORCE_PP,
    Advantage.REINFORCE_PP_BASELINE: REINFORCE_PP_BASELINE,
    Advantage.PPO: critic.PPO,
    Advantage.RUNNING: RUNNING,
}


# Parts of the user's functions, with the configuration of their check, by the key of the function.
_checked: dict[str, tuple[AlgorithmSection, Any]] = {}


def surrogate_of(cfg: AlgorithmSection) -> Surrogate:
    """Return the policy loss of the configuration. Raises: ConfigError: the user's is refused."""
    if ":" in cfg.policy_loss:
        return _of_user(cfg, "policy_loss", "user_surrogate")
    return SURROGATES[PolicyLoss(cfg.policy_loss)]


def weight_of(cfg: AlgorithmSection) -> Weight:
    """Return the correction of the configuration. Raises: ConfigError: the user's is refused."""
    if ":" in cfg.correction:
        return _of_user(cfg, "correction", "user_weight")
    return WEIGHTS[Correction(cfg.correction)]


def estimator_of(cfg: AlgorithmSection) -> Estimator:
    """Return the estimator of advantages. Raises: ConfigError: the user's is refused."""
    if ":" in cfg.advantage:
        return _of_user(cfg, "advantage", "user_estimator")
    return ESTIMATORS[Advantage(cfg.advantage)]


def check(cfg: AlgorithmSection, *, min_size: int) -> None:
    """Check the algorithms of a configuration.

    Args:
        min_size: size of the smallest group of a batch.

    Raises: ConfigError: a function of the user is refused.
    """
    surrogate_of(cfg)
    weight_of(cfg)
    if ":" in cfg.advantage:
        from learner.algorithms.user_functions import check_group

        check_group(estimator_of(cfg), cfg, min_size)


def _of_user(cfg: AlgorithmSection, name: str, make: str) -> Any:
    """Return the part of a user's function, checked once for each configuration."""
    from learner.algorithms import user_functions  # It imports torch, which takes seconds.

    checked = _checked.get(name)
    if checked is None or checked[0] != cfg:
        part = getattr(user_functions, make)(getattr(cfg, name), cfg)
        checked = _checked[name] = (cfg, part)
    return checked[1]
