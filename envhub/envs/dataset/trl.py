"""The signature of TRL's reward functions: lists of one value, and functions for logs."""

import re
from typing import Any

from common.errors import ConfigError
from envhub.envs.dataset.functions import UserFunction, needed_keywords

# Keywords that hold a list. A function with one of them has TRL's signature.
BATCHED = frozenset(("prompts", "completions", "completion_ids"))
LOGS = ("log_metric", "log_extra")
IDS = "completion_ids"


def is_of_trl(user: UserFunction) -> bool:
    """Return whether a function has TRL's signature."""
    return not BATCHED.isdisjoint(user.keywords)


def check_ids(where: str, user: UserFunction, tokenizer: Any) -> None:
    """Raise ConfigError if a function needs token ids, and no tokenizer is configured."""
    if IDS in needed_keywords(user) and tokenizer is None:
        raise ConfigError(
            f"{where}: the function needs {IDS!r}; set data.tokenizer, which encodes the answers"
        )


class LoggedMetrics:
    """The functions with which a reward of TRL logs. They collect metrics of the episode."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.values: dict[str, float] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Record a metric. Its name gets the reward's name in front."""
        self.values[f"reward_{self._name}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"] = float(value)

    def log_extra(self, column: str, values: Any) -> None:
        """Ignore a column for TRL's table of completions. The journal has all completions."""
