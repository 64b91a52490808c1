"""A judge as one of the weighted rewards of a dataset."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.functions.calls import Caller
from envhub.envs.dataset.judges.judge import Judge
from envhub.envs.dataset.judges.options import read_options
from envhub.envs.dataset.judges.rubric import check_rubric

Keywords = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTerm:
    """One named reward that asks a language model. Its value is in [0, 1]."""

    name: str
    weight: float
    judge: Judge
    least: float = 0.0
    most: float = 1.0

    @property
    def longest_s(self) -> float:
        """The most seconds until the score is there."""
        return self.judge.longest_s

    def check(self, keywords: Keywords, columns: Keywords) -> None:
        """Raise ConfigError if the rubric needs a name that is not offered."""
        check_rubric(self.judge.options, {**columns, **keywords}, "the first record")

    async def value(
        self, caller: Caller, keywords: Keywords, columns: Keywords, place: str
    ) -> tuple[float, dict[str, float]]:
        """Return the score and its cost as metrics. Raises: ServiceDown, EnvFailure."""
        score, cost = await self.judge.ask(caller, {**columns, **keywords}, place)
        return score, cost.as_metrics(self.name)


def judge_term(
    name: str, entry: Mapping[str, Any], *, run_dir: str, num_processes: int
) -> JudgeTerm:
    """Return the judge of an entry of `reward`. Raises: ConfigError: the entry is wrong."""
    weight = entry.get("weight", 1.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not -1e6 <= weight <= 1e6:
        raise ConfigError(f"reward.{name}.weight={weight}: must be a number in [-1e6, 1e6]")
    judge = Judge(read_options(name, entry), run_dir=run_dir, num_processes=num_processes)
    return JudgeTerm(name=name, weight=float(weight), judge=judge)
