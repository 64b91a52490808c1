"""BabyAI's catalogue entry."""

from functools import partial

from common.config.envs import EnvsSection
from envhub.env import EnvSpec
from envhub.envs.babyai import levels
from envhub.envs.babyai.agentgym_episode import AgentGymBabyAiEnv
from envhub.envs.babyai.episode import SUBSETS, BabyAiEnv
from envhub.tasks import spec_beside


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return BabyAI's catalogue entry."""
    has_rules = options.babyai.agentgym_rules or options.agentgym_rules
    kind = AgentGymBabyAiEnv if has_rules else BabyAiEnv
    make = partial(kind, options=options.babyai)
    return spec_beside(
        __file__, SUBSETS, make, from_agentgym=levels.from_agentgym, column_item=levels.column_item
    )
