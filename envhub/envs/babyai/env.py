"""BabyAI's catalogue entry."""

from functools import partial

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, Isolation
from envhub.envs.babyai import levels
from envhub.envs.babyai.agentgym_episode import AgentGymBabyAiEnv
from envhub.envs.babyai.episode import SUBSETS, BabyAiEnv
from envhub.tables import read_instructions
from envhub.tasks import load_tasks


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return BabyAI's catalogue entry."""
    has_rules = options.babyai.agentgym_rules or options.agentgym_rules
    kind = AgentGymBabyAiEnv if has_rules else BabyAiEnv
    return EnvSpec(
        name="babyai",
        subsets=SUBSETS,
        instruction=read_instructions(__file__),
        make=partial(kind, options=options.babyai),
        tasks=load_tasks(__file__),
        isolation=Isolation.INLINE,
        from_agentgym=levels.from_agentgym,
    )
