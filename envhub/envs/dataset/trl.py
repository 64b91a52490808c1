"""The signature of TRL's reward functions: lists of one value, and functions for logs."""

import math
import re
from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError
from envhub.envs.dataset.functions import UserFunction

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
