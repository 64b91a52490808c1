"""The algorithms by their names in the configuration, and functions of the user."""

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


def surrogate_of(cfg: AlgorithmSection) -> Surrogate:
    """Return the policy loss of the configuration."""
    return SURROGATES[PolicyLoss(cfg.policy_loss)]


def weight_of(cfg: AlgorithmSection) -> Weight:
    """Return the correction of the configuration."""
    return WEIGHTS[Correction(cfg.correction)]


def estimator_of(cfg: AlgorithmSection) -> Estimator:
    """Return the estimator of advantages of the configuration."""
    return ESTIMATORS[Advantage(cfg.advantage)]
