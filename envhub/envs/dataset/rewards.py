"""The rewards of a dataset: their configuration, their calls, and their weighted sum in [0, 1]."""

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from common.config.envs import DatasetOptions
from common.errors import ConfigError
from common.functions.calls import (
    OVERRUN_S,
    Caller,
    Ungraded,
    UserFunction,
    check_imports,
    check_keywords,
    load_function,
    shipped_function,
)
from envhub.env import EnvFailure
from envhub.envs.dataset.graders import GRADERS, LIBRARIES
from envhub.envs.dataset.judges.judge import SEARCH, Judge
from envhub.envs.dataset.judges.options import is_judge
from envhub.envs.dataset.judges.term import JudgeTerm, judge_term
from envhub.envs.dataset.records import load_tokenizer

logger = logging.getLogger(__name__)


# Keywords that hold a list. A function with one of them has TRL's signature.
BATCHED = frozenset(("prompts", "completions", "completion_ids"))
LOGS = ("log_metric", "log_extra")
IDS = "completion_ids"


def is_of_trl(user: UserFunction) -> bool:
    """Return whether a function has TRL's signature."""
    return not BATCHED.isdisjoint(user.keywords)


def check_ids(where: str, user: UserFunction, tokenizer: Any) -> None:
    """Raise ConfigError if a function needs token ids, and no tokenizer is configured."""
    if IDS in user.needed and tokenizer is None:
        raise ConfigError(
            f"{where}: the function needs {IDS!r}; set data.tokenizer, which encodes the answers"
        )


def metrics_of(reward: str, extra: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers that a function returned beside its reward, as metrics."""
    numbers: dict[str, float] = {}
    for name, value in extra.items():
        value = plain_number(value)
        value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            numbers[_metric_name(reward, str(name))] = float(value)
    return numbers


def plain_number(value: Any) -> Any:
    """Return a number or an array of numpy or torch in plain types, and other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _metric_name(reward: str, name: str) -> str:
    """Return the name of a metric of a reward."""
    return f"reward_{reward}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"


# Names of the number in a returned dictionary: verl and slime, rLLM, EasyR1, OpenRLHF.
SCORES = ("score", "reward", "overall", "rewards", "scores")
KEYS = ("function", "weight", "min", "max", "timeout_s", "timeout_score", "retries")
NUMBERS = {  # Allowed values of the numbers of a reward.
    "weight": (-1e6, 1e6),
    "min": (-1e6, 1e6),
    "max": (-1e6, 1e6),
    "timeout_s": (1e-3, 1e5),
    "timeout_score": (-1e6, 1e6),
    "retries": (0, 100),
}
MATH_VERIFY = (
    "reward=math needs math-verify. Install it with: pip install math-verify (the extra `math`)"
)
SHIPPED_TIMEOUT_S = 10.0  # Most seconds of a call of a reward that ships.
AUTO = "auto"
GENERATED = "reasoning_gym:"  # Prefix of data.train for tasks that are generated.
BACKOFF_S = 0.5  # Seconds before the first retry. The wait doubles with each retry.
DIGITS = 9
Keywords = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One named reward function."""

    name: str
    user: UserFunction
    weight: float
    least: float  # The smallest value that the function returns.
    most: float
    timeout_s: float
    retries: int
    # The value of a call that reaches its time limit, or whose process ends. None: it is a failure.
    timeout_score: float | None = None
    tokenizer: Any = None  # Encodes the answer for functions that name `completion_ids`.

    @property
    def is_batched(self) -> bool:
        """Whether the function has TRL's signature, with a list for each keyword."""
        return is_of_trl(self.user)

    @property
    def longest_s(self) -> float:
        """The most seconds that the function's calls and the waits between them take."""
        waits_s = BACKOFF_S * (2**self.retries - 1)
        overrun_s = OVERRUN_S + self.user.load_s
        num_calls = 1 + self.retries + self._checks_timeouts
        return (self.timeout_s + overrun_s) * num_calls + waits_s

    @property
    def _checks_timeouts(self) -> bool:
        """Whether a call that reached its limit is compared with one of an empty answer."""
        return self.user.is_shipped and self.timeout_score is not None

    def offered(self, keywords: Keywords, columns: Keywords) -> dict[str, Any]:
        """Return the keywords of a call; with TRL's signature, each is a list of one value.

        `prompt` and `completion` are messages for a function that annotates them as lists, such as
        those of verifiers.
        """
        if not self.is_batched:
            num_asked = keywords["num_asked"]
            messages = keywords["messages"]
            parts = {"prompt": messages[:num_asked], "completion": messages[num_asked:]}
            lists = {name: part for name, part in parts.items() if name in self.user.lists}
            return {**columns, **keywords, **lists}
        trl_keywords = {name: keywords[name] for name in ("prompts", "completions")}
        if self.tokenizer is not None:
            text = keywords["completion"]
            trl_keywords[IDS] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return {name: [value] for name, value in {**columns, **trl_keywords}.items()}

    def read(self, value: Any) -> tuple[float | None, dict[str, float]]:
        """Return the number of a returned value, and the metrics beside it. Raises: EnvFailure.

        A dictionary has the number as "score" (verl) or as another name of SCORES. Its other
        numbers are metrics, and so is the second part of a pair (number, dictionary).
        None: with TRL's signature, [None] means that the function does not apply to the record.
        """
        extra: Any = {}
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
            value, extra = value
        if isinstance(value, Mapping):
            name = next((name for name in SCORES if name in value), None)
            if name is None:
                raise EnvFailure(
                    f"returned {value!r:.200}, which is not a number and has no 'score'"
                )
            extra = {key: entry for key, entry in value.items() if key != name}
            value = value[name]
        value = plain_number(value)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
            if value is None and self.is_batched:
                return None, {}
        elif self.is_batched and not isinstance(value, (bool, int, float)):
            raise EnvFailure(f"returned {value!r:.200}, not a list with one number")
        return self.number(value), metrics_of(self.name, extra or {})

    def number(self, value: Any) -> float:
        """Return a returned value as a number in the range. Raises: EnvFailure: it is none."""
        if not isinstance(value, (bool, int, float)):
            raise EnvFailure(f"returned {value!r:.200}, which is not a number")
        if not math.isfinite(value):
            raise EnvFailure(f"returned {value}, which is not a finite number")
        if not self.least <= value <= self.most:
            law = f"outside of [{self.least:g}, {self.most:g}]"
            keys = f"set reward.{self.name}.min and reward.{self.name}.max"
            raise EnvFailure(f"returned {value:g}, {law}; {keys}")
        return float(value)

    def check(self, keywords: Keywords, columns: Keywords) -> None:
        """Raise ConfigError if the function needs a keyword that is not offered."""
        where = f"reward.{self.name}={self.user.reference}"
        offered = self.offered(keywords, columns)
        if self.is_batched:
            check_ids(where, self.user, self.tokenizer)
            offered |= dict.fromkeys(LOGS)
        if "group" in self.user.needed and "group" not in offered:
            raise ConfigError(
                f"{where}: the function compares a group; set groups.reward={self.user.reference},"
                " and reward=none if single answers have no reward"
            )
        check_keywords(where, self.user, offered)

    def check_imports(self, keywords: Keywords, columns: Keywords) -> None:
        """Raise ConfigError if a call with an example fails because a package is missing."""
        where = f"reward.{self.name}={self.user.reference}"
        check_imports(where, self.user, self.offered(keywords, columns))

    async def value(
        self, caller: Caller, keywords: Keywords, columns: Keywords, place: str
    ) -> tuple[float | None, dict[str, float]]:
        """Return the value and its metrics; a failed call is repeated. Raises: EnvFailure.

        None: the function does not apply to the record.
        """
        offered = self.offered(keywords, columns)
        is_counted = self.timeout_score is not None
        counted = {f"reward_{self.name}_timeout": 0.0} if is_counted else {}
        for attempt in range(self.retries + 1):
            try:
                returned = await caller.call(
                    self.user, offered, timeout_s=self.timeout_s, takes_logs=self.is_batched
                )
                number, extra = self.read(returned.value)
                return number, {**counted, **extra, **metrics_of(self.name, returned.logged)}
            except EnvFailure as error:
                if attempt == self.retries:
                    if isinstance(error, Ungraded) and self.timeout_score is not None:
                        if self._checks_timeouts:
                            await self._check_without_answer(caller, offered, place, error)
                        shown = (self.name, place, self.timeout_score, error)
                        logger.warning("reward=%s is no match for %s: worth %g reason=%s", *shown)
                        return self.timeout_score, dict.fromkeys(counted, 1.0)
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    what = f"reward {self.name} failed on {place}{tries}: {error}"
                    raise EnvFailure(f"{what} ({self.user.reference})") from error
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _check_without_answer(
        self, caller: Caller, offered: Keywords, place: str, ended: Ungraded
    ) -> None:
        """Check that a call with an empty answer returns in time.

        Otherwise the answer did not cause the time-out: a busy machine, or the entry of a
        generated task, takes as long. Raises: EnvFailure.
        """
        without = {**offered, "completion": ""}
        try:
            await caller.call(self.user, without, timeout_s=self.timeout_s)
        except EnvFailure as error:
            raise EnvFailure(
                f"reward {self.name} failed on {place}: {ended}; an empty answer fails, too:"
                f" {error} ({self.user.reference})"
            ) from error


Term = RewardTerm | JudgeTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReward:
    """The reward of an episode: the sum in [0, 1], and the value of each function."""

    total: float
    values: dict[str, float]
    costs: dict[str, float]  # Metrics of the judges.


class RewardSum:
    """The weighted sum of the rewards, mapped from its range to [0, 1].

    Example: weights 1 and 0.5, values 1 and 0, both in [0, 1]. The sum is 1 of 1.5, so 0.666666667.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        bounds = [sorted((t.weight * t.least, t.weight * t.most)) for t in terms]
        self._least = sum(low for low, _ in bounds)
        self._most = sum(high for _, high in bounds)

    @property
    def start_score(self) -> float:
        """The score of an episode before its end: a sum of 0, mapped to [0, 1]."""
        return self._mapped(0.0)

    @property
    def longest_s(self) -> float:
        """The most seconds until all rewards have returned; they run at the same time."""
        return max(term.longest_s for term in self.terms)

    def check(self, keywords: Keywords, columns: Keywords) -> None:
        """Raise ConfigError if a function needs a keyword that is not offered."""
        for term in self.terms:
            term.check(keywords, columns)

    def check_imports(self, keywords: Keywords, columns: Keywords) -> None:
        """Raise ConfigError if a call of a function fails because a package is missing."""
        for term in self.terms:
            if isinstance(term, RewardTerm):
                term.check_imports(keywords, columns)

    @property
    def functions(self) -> list[UserFunction]:
        """The functions among the rewards, and the search for the patterns of judges."""
        users = [term.user for term in self.terms if isinstance(term, RewardTerm)]
        return [*users, SEARCH] if any(each.rubric.pattern for each in self.judges) else users

    @property
    def compared(self) -> list[str]:
        """The names of the rewards that ship and compare an answer with a reference answer."""
        return [
            term.name
            for term in self.terms
            if isinstance(term, RewardTerm)
            and term.user.is_shipped
            and "ground_truth" in term.user.needed
        ]

    @property
    def verifies(self) -> bool:
        """Whether a reward is the verifier of a generated task."""
        return any(user.is_shipped and user.reference == "verifier" for user in self.functions)

    @property
    def judges(self) -> list[Judge]:
        """The judges among the rewards."""
        return [term.judge for term in self.terms if isinstance(term, JudgeTerm)]

    async def score(
        self, caller: Caller, keywords: Keywords, columns: Keywords, place: str
    ) -> EpisodeReward:
        """Return the reward of an episode.

        Args:
            place: the record, for error messages.

        Raises: EnvFailure: a function failed; the text names it, the record and the error.
            ServiceDown: a judge does not answer.
        """
        calls = [term.value(caller, keywords, columns, place) for term in self.terms]
        outcomes = await asyncio.gather(*calls)
        outputs = {t.name: value for t, (value, _) in zip(self.terms, outcomes, strict=True)}
        values = {name: value for name, value in outputs.items() if value is not None}
        if not values:
            raise EnvFailure(f"no reward applies to {place}: each function returned [None]")
        costs = {name: cost for _, own in outcomes for name, cost in own.items()}
        return EpisodeReward(total=self._total(values), values=values, costs=costs)

    def _total(self, values: Mapping[str, float]) -> float:
        """Return the weighted sum, mapped to [0, 1].

        A function that does not apply counts as 0, or as the end of its range next to 0.
        """
        neutral = {term.name: min(max(0.0, term.least), term.most) for term in self.terms}
        chosen = {**neutral, **values}
        return self._mapped(sum(term.weight * chosen[term.name] for term in self.terms))

    def _mapped(self, total: float) -> float:
        """Return a sum of rewards, mapped to [0, 1]."""
        share = (total - self._least) / (self._most - self._least)
        return round(min(max(share, 0.0), 1.0), DIGITS)


def load_rewards(options: DatasetOptions, *, run_dir: str = "") -> RewardSum:
    """Return the rewards of the configuration.

    Args:
        run_dir: the run directory, which keeps the answers of judges; "": there is none.

    Raises: ConfigError: no reward is set, a key is wrong, or a function cannot be loaded.
    """
    reward = options.reward
    is_generated = options.train.startswith(GENERATED)
    if reward == AUTO or (is_generated and not reward):
        reward = "verifier" if is_generated else "exact_number"
    if not reward:
        names = ", ".join(GRADERS)
        raise ConfigError(f"reward is not set: give reward=module:function, or one of {names}")
    if isinstance(reward, str):
        user = _function("reward", reward, options)
        name = re.sub(r"\W", "_", reward.rpartition(":")[2])
        return RewardSum([_term(name, user, {}, options)])
    if not isinstance(reward, dict):
        raise ConfigError(f"reward={reward}: expects a function, or a map from names to functions")
    terms = [_named_term(str(name), entry, options, run_dir) for name, entry in reward.items()]
    if not any(term.weight for term in terms):
        raise ConfigError("reward: the weight of every reward is 0; give one another weight")
    return RewardSum(terms)


def _named_term(name: str, entry: Any, options: DatasetOptions, run_dir: str) -> Term:
    """Return the reward of one entry of the map. Raises: ConfigError."""
    key = f"reward.{name}"
    if not name.isidentifier():
        raise ConfigError(f"{key}: the name must consist of letters, digits and _")
    if is_judge(entry):
        return judge_term(name, entry, run_dir=run_dir, num_processes=options.max_workers)
    fields = {"function": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("function"), str):
        raise ConfigError(
            f"{key}={entry}: expects a function, or a section with function=..., url=... or"
            " path=..."
        )
    for field, value in fields.items():
        if field not in KEYS:
            raise ConfigError(f"{key}.{field}={value}: no such key; there are {', '.join(KEYS)}")
        if field in NUMBERS:
            low, high = NUMBERS[field]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise ConfigError(f"{key}.{field}={value}: must be a number in [{low:g}, {high:g}]")
    return _term(name, _function(key, fields["function"], options), fields, options)


def _term(
    name: str, user: UserFunction, fields: Mapping[str, Any], options: DatasetOptions
) -> RewardTerm:
    """Return a reward function with its weight and its range. Raises: ConfigError."""
    least = float(fields.get("min", 0.0))
    most = float(fields.get("max", 1.0))
    if least >= most:
        raise ConfigError(f"reward.{name}.min={least:g}: must be < reward.{name}.max={most:g}")
    limit_s = options.reward_timeout_s
    if user.is_shipped:
        limit_s = min(limit_s, SHIPPED_TIMEOUT_S)
    score = fields.get("timeout_score", 0.0 if user.is_shipped else None)
    if score is not None and user.function is None and not least <= score <= most:
        where = f"reward.{name}.timeout_score={score:g}"
        raise ConfigError(f"{where}: must be in [{least:g}, {most:g}]")
    return RewardTerm(
        name=name,
        user=user,
        weight=float(fields.get("weight", 1.0)),
        least=least,
        most=most,
        timeout_s=float(fields.get("timeout_s", limit_s)),
        retries=int(fields.get("retries", options.reward_retries)),
        timeout_score=None if score is None or user.function else float(score),
        tokenizer=load_tokenizer(options) if IDS in user.keywords else None,
    )


def _function(key: str, reference: str, options: DatasetOptions) -> UserFunction:
    """Return a reward that ships, or a function of the user. Raises: ConfigError."""
    if ":" in reference:
        return load_function(key, reference)
    if reference == "judge":
        raise ConfigError(f"{key}=judge: set reward.judge.url or reward.judge.path instead")
    if reference == "math" and find_spec("math_verify") is None:
        raise ConfigError(MATH_VERIFY)
    if reference == "verifier" and not options.train.startswith(GENERATED):
        law = f"only generated tasks have a verifier; set data.train={GENERATED}NAME"
        raise ConfigError(f"{key}=verifier: {law}")
    grader = GRADERS.get(reference)
    if grader is None:
        names = ", ".join(GRADERS)
        raise ConfigError(
            f"{key}={reference}: expects module:function, file.py:function or one of {names}"
        )
    return shipped_function(reference, grader, library=LIBRARIES.get(reference, ""))
