"""Reads how a chat request wants its answers sampled."""

from dataclasses import dataclass
from typing import Any

from actor.api.requests import invalid, read_limit, unsupported
from common.config.actor import ActorSection

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 2.0
MAX_CHOICES = 128
# Sampling fields that the engine is not given, with their values without effect.
FIXED = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the answers to one request are sampled."""

    temperature: float | None  # None: that of the actor's configuration.
    seed: int | None
    num_choices: int
    max_tokens: int  # Maximum tokens of an answer.


def read_sampling(body: dict[str, Any], actor: ActorSection) -> Sampling:
    """Return how a request wants its answers sampled. Raises: ApiError: a value is invalid."""
    for name, harmless in FIXED.items():
        if body.get(name) not in harmless:
            raise unsupported(name, body[name], "the policy samples without it")
    limit = read_limit(body, "max_completion_tokens", "max_tokens")
    return Sampling(
        temperature=_temperature(body),
        seed=_seed(body),
        num_choices=_num_choices(body),
        max_tokens=actor.max_turn_tokens if limit is None else limit,
    )


def _num_choices(body: dict[str, Any]) -> int:
    """Return the number of answers to one request. Raises: ApiError."""
    num = body.get("n")
    if num is None:
        return 1
    if type(num) is not int or not 1 <= num <= MAX_CHOICES:
        raise invalid(f"n={num!r:.80}: a whole number from 1 to {MAX_CHOICES}", "n")
    return num


def _temperature(body: dict[str, Any]) -> float | None:
    """Return the requested temperature; None: the configured one. Raises: ApiError."""
    given = body.get("temperature")
    if given is None:
        return None
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 <= given <= MAX_TEMPERATURE:
        text = f"temperature={given!r:.80}: a number in [0, {MAX_TEMPERATURE:g}]"
        raise invalid(text, "temperature")
    return float(given)


def _seed(body: dict[str, Any]) -> int | None:
    """Return the requested seed; None: no seed. Raises: ApiError."""
    seed = body.get("seed")
    if seed is None:
        return None
    if type(seed) is not int or abs(seed) > MAX_SEED:
        raise invalid(f"seed={seed!r:.80}: a whole number of 63 bits", "seed")
    return seed % (MAX_SEED + 1)
