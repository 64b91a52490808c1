"""The configuration of a judge: a reward that asks a language model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import ConfigError
from common.repository import ROOT, working_directory

# Environment variable with the key of all engines of a run. It is in no file.
KEY_VARIABLE = "LONGSTRIDE_JUDGE_KEY"
ROLE_KEYS = ("serve", "gpus")  # Keys of `reward.NAME` that only the launcher reads.


def role_name(judge: str) -> str:
    """Return the name of the role that serves a judge."""
    return f"judge-{judge}"


def find_model(path: str) -> Path:
    """Return a model folder, below the command's directory or else the repository."""
    here = working_directory() / Path(path).expanduser()
    return here if here.exists() else ROOT / path


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """The section `reward.NAME` of a judge, without the keys that all rewards share."""

    name: str
    url: str = ""  # Base URL of the endpoint, such as https://host/v1.
    path: str = ""  # Model folder of an engine that the run starts.
    model: str = ""
    key_env: str = ""  # Environment variable with the key.
    rubric: str = ""  # Jinja template of the request, or a file with it. "": the default.
    system: str = ""  # System prompt, or a file with it. "": the default.
    pattern: str = ""  # Regular expression whose last match has the score. "": the default.
    json: str = ""  # Field of a JSON answer with the score; a dot enters an object.
    scores: dict[str, float] = field(default_factory=dict[str, float])  # Word -> score.
    min: float = 0.0  # The score that becomes 0.
    max: float = 10.0  # The score that becomes 1.
    temperature: float = 0.0
    max_tokens: int = 256
    extra: dict[str, Any] = field(default_factory=dict[str, Any])  # More fields of a request.
    concurrency: int = 16  # Most requests at once, over all worker processes of a hub.
    budget: int = 0  # Most answered requests of the run. 0: no limit.
    cache: bool = True
    timeout_s: float = 15.0  # Limit of one request.
    retries: int = 2  # Requests after one that failed or whose answer has no score.

    @property
    def key_variable(self) -> str:
        """The environment variable with the key; "" without a key."""
        return KEY_VARIABLE if self.path else self.key_env

    @property
    def role(self) -> str:
        """The role that serves the engine of the judge."""
        return role_name(self.name)

    @property
    def shown(self) -> str:
        """The judge as text for messages."""
        return f"reward.{self.name}.path={self.path}" if self.path else self.url


BOUNDS = {  # Allowed values of the numbers.
    "min": (-1e6, 1e6),
    "max": (-1e6, 1e6),
    "temperature": (0, 100),
    "max_tokens": (1, 10**6),
    "concurrency": (1, 10**4),
    "budget": (0, 10**12),
    "timeout_s": (1e-3, 1e5),
    "retries": (0, 100),
}
WHOLE = ("max_tokens", "concurrency", "budget", "retries")
KINDS: dict[str, type] = {"scores": dict, "extra": dict, "cache": bool}
OWN_KEYS = tuple(each.name for each in fields(JudgeOptions) if each.name != "name")


def is_judge(entry: object) -> bool:
    """Return whether an entry of the map `reward` is a judge."""
    return isinstance(entry, Mapping) and ("url" in entry or "path" in entry)


def read_options(name: str, entry: Mapping[str, Any]) -> JudgeOptions:
    """Return the options of an entry, without the keys `weight`, `serve` and `gpus`.

    Raises: ConfigError: a key is unknown, a value is wrong, or keys contradict each other.
    """
    shared = ("weight", *ROLE_KEYS)
    settings = {key: value for key, value in entry.items() if key not in shared}
    for key, value in settings.items():
        _check_value(name, key, value)
    if not entry.get("path") and (unused := [key for key in ROLE_KEYS if key in entry]):
        where = f"reward.{name}.{unused[0]}={entry[unused[0]]}"
        raise ConfigError(f"{where}: has no effect without reward.{name}.path")
    options = JudgeOptions(name=name, **settings)
    _check_place(options)
    _check_rule(options)
    return options


def _check_value(name: str, key: str, value: Any) -> None:
    """Raise ConfigError if a judge has no such key, or the value is out of bounds."""
    where = f"reward.{name}.{key}={value}"
    if key not in OWN_KEYS:
        names = ", ".join((*OWN_KEYS, "weight", *ROLE_KEYS))
        raise ConfigError(f"{where}: no such key of a judge; there are {names}")
    if key in BOUNDS:
        low, high = BOUNDS[key]
        kinds = (int,) if key in WHOLE else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            kind = "a whole number" if key in WHOLE else "a number"
            raise ConfigError(f"{where}: must be {kind} in [{low:g}, {high:g}]")
        return
    kind = KINDS.get(key, str)
    if not isinstance(value, kind):
        words = {dict: "a map", bool: "true or false", str: "text"}[kind]
        raise ConfigError(f"{where}: expects {words}")


def _check_place(options: JudgeOptions) -> None:
    """Check the address or the folder of a judge. Raises: ConfigError."""
    key = f"reward.{options.name}"
    if bool(options.url) == bool(options.path):
        raise ConfigError(f"{key}: set either {key}.url or {key}.path")
    if options.path:
        if options.key_env:
            what = f"{key}.key_env={options.key_env}"
            raise ConfigError(f"{what}: has no effect with {key}.path, whose key the run creates")
        if not (find_model(options.path) / "config.json").is_file():
            raise ConfigError(f"{key}.path={options.path}: the folder has no config.json")
        return
    parts = urlsplit(options.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}.url={options.url}: must be a URL such as https://host/v1")
    if parts.username or parts.password or parts.query:
        shown = f"{parts.scheme}://{parts.hostname}"
        raise ConfigError(
            f"{key}.url={shown}: a URL must hold no key. Give the name of an environment variable"
            f" with {key}.key_env"
        )
    if not options.model:
        raise ConfigError(f"{key}.model is not set: name the model at {options.url}")


def _check_rule(options: JudgeOptions) -> None:
    """Check the rule that reads the score of an answer. Raises: ConfigError."""
    key = f"reward.{options.name}"
    if options.pattern and options.json:
        raise ConfigError(f"{key}.json={options.json}: unset it, or {key}.pattern")
    if options.min >= options.max:
        raise ConfigError(f"{key}.min={options.min:g}: must be < {key}.max={options.max:g}")
    try:
        num_groups = re.compile(options.pattern).groups
    except re.error as error:
        where = f"{key}.pattern={options.pattern}"
        raise ConfigError(f"{where}: not a regular expression: {error}") from error
    if num_groups > 1:
        where = f"{key}.pattern={options.pattern}"
        raise ConfigError(f"{where}: has {num_groups} groups; at most one marks the score")
    for word, score in cast(dict[Any, Any], options.scores).items():
        is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
        if not is_number or not options.min <= score <= options.max:
            bounds = f"[{options.min:g}, {options.max:g}], from {key}.min and {key}.max"
            raise ConfigError(f"{key}.scores.{word}={score}: must be a number in {bounds}")
