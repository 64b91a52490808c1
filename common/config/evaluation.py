"""Options of evaluation, and of a policy that is asked over HTTP instead of run here."""

from dataclasses import dataclass
from enum import StrEnum

from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


class EvalItems(StrEnum):
    """Which held-out items the command `eval` plays.

    spread: the first ones of every configured subset, by the tasks' weights. tasks: the test lists
    of the catalogue's tasks, which the configured subsets must be; all of them, unless the command
    line gives `eval.num_items` too.
    """

    SPREAD = "spread"
    TASKS = "tasks"


@dataclass(slots=True, kw_only=True)
class EvalSection:
    """Held-out evaluation, always at the full horizon."""

    num_items: int = 400  # spread over the tasks by weight; -1: all there are
    before: bool = True
    after: bool = True
    baselines: bool = True  # uniform valid play and the scripted expert on the same items
    every_steps: int = 0  # also while training goes on, every so many steps; 0: not
    stream_items: int = 128  # held-out items of each evaluation while training goes on
    k: int = 1  # command `eval`: samples of each item
    items: EvalItems = EvalItems.SPREAD  # command `eval`: which items
    label: str = ""  # command `eval`: name of the table's row; "": the model's
    max_failed_frac: float = 0.05  # command `eval`: more infrastructure failures mean exit code 1

    def __post_init__(self) -> None:
        _require(self.num_items >= -1, "eval.num_items", self.num_items, "must be >= -1")
        _require(self.every_steps >= 0, "eval.every_steps", self.every_steps, "must be >= 0")
        _require(self.stream_items >= 1, "eval.stream_items", self.stream_items, "must be >= 1")
        _require(self.k >= 1, "eval.k", self.k, "must be >= 1")
        frac = self.max_failed_frac
        _require(0 <= frac <= 1, "eval.max_failed_frac", frac, "must be in [0, 1]")


@dataclass(slots=True, kw_only=True)
class PolicySection:
    """A policy behind an OpenAI-compatible endpoint; only the command `eval` asks it."""

    url: str = ""  # like https://host/v1; "": the checkpoint at model.path plays, in an engine here
    model: str = ""  # as the endpoint calls it
    api_key_env: str = ""  # environment variable that holds the key; "": no key is sent
    temperature: float = 1.0
    max_turn_tokens: int = 1024  # sampled tokens per turn, hidden reasoning included
    limit_key: str = "max_tokens"  # | max_completion_tokens: what the endpoint calls that limit
    max_concurrent: int = 16  # requests at once
    timeout_s: float = 300.0  # of one request
    max_tries: int = 6  # of one turn; an episode whose turn gets no answer is a failure
    backoff_s: float = 1.0  # before the second try; doubles
    max_backoff_s: float = 60.0  # also of what the endpoint asks for by Retry-After

    def __post_init__(self) -> None:
        if self.url:
            is_http = self.url.startswith(("http://", "https://"))
            _require(is_http, "policy.url", self.url, "must begin with http:// or https://")
            law = "policy.url needs the name of a model of that endpoint"
            _require(bool(self.model), "policy.model", self.model, law)
        _require(self.temperature >= 0, "policy.temperature", self.temperature, "must be >= 0")
        keys = ("max_tokens", "max_completion_tokens")
        _require(self.limit_key in keys, "policy.limit_key", self.limit_key, f"one of {keys}")
        for name in ("max_turn_tokens", "max_concurrent", "max_tries"):
            _require(getattr(self, name) >= 1, f"policy.{name}", getattr(self, name), ">= 1")
        _require(self.timeout_s > 0, "policy.timeout_s", self.timeout_s, "must be > 0")
