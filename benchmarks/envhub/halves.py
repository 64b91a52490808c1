"""BabyAI that sends half a character with every answer while a file exists: for faulty runs.

The key `envhub.envs=["benchmarks.envhub.halves:make_spec"]` names the environment. The key
`envs.plugins={halves: PATH}` names the file.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from common.config.envs import BabyaiOptions, EnvsSection
from envhub.env import EnvSpec, Isolation, StepResult, Style
from envhub.envs.babyai import env as babyai
from envhub.envs.babyai.episode import BabyAiEnv

HALF = "\ud83d"  # of a pair of UTF-16, as scripts make them that cut a text: no UTF-8 has it
MAX_SESSIONS = 256


class HalvesEnv(BabyAiEnv):
    """One BabyAI episode, told with half an emoji in the end."""

    def __init__(self, style: Style, *, options: BabyaiOptions, flag: Path) -> None:
        super().__init__(style, options=options)
        self._flag = flag

    def reset(self, item_id: str, seed: int = 0) -> str:
        return self._cut(super().reset(item_id, seed))

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return structs.replace(result, observation=self._cut(result.observation))

    def _cut(self, text: str) -> str:
        return f"{text} {HALF}" if self._flag.exists() else text


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return BabyAI's catalogue entry with other episodes. Raises: KeyError: no file is named."""
    flag = Path(options.plugins["halves"])
    return replace(
        babyai.make_spec(options),
        make=partial(HalvesEnv, options=options.babyai, flag=flag),
        isolation=Isolation.WORKER,
        sessions_per_worker=MAX_SESSIONS,
    )
