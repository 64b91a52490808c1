"""Environments of other libraries that are described by a YAML file: `mcp:calculator.yaml`."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.errors import ConfigError
from envhub.env import SubsetSpec
from envhub.interop.texts import RewardRule

SUBSET = "all"
PACKAGES = {  # Arguments of `pip install` for extras that `make setup` does not install.
    "mcp": "jsonschema 'mcp>=2.3,<3'",
    "reasoning-gym": "reasoning-gym==0.1.25",
    "textarena": "textarena==0.7.4",
    "textworld": "textworld==1.7.0",
}
# The same for packages that are no extra, since an extra has no options of pip.
PACKAGES_APART = {"bfcl": "--no-deps bfcl-eval==2026.3.23"}
Described = TypeVar("Described")
Found = TypeVar("Found")


def read_description(reference: str, form: type[Described]) -> tuple[Path, Described]:
    """Return the path in `library:file.yaml` and the file's content as a dataclass `form`.

    Raises: ConfigError: no such file, an unknown key, or a value of another type.
    """
    path = Path(reference.partition(":")[2])
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ConfigError(f"{reference}: no such YAML file (from {Path.cwd()})")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(form), OmegaConf.load(path))
        return path, cast(Described, OmegaConf.to_object(merged))
    except YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" line {line + 1}"
        problem = getattr(error, "problem", error)
        raise ConfigError(f"{reference}{where}: not valid YAML: {problem}") from error
    except (OmegaConfBaseException, ValueError, OSError) as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(
            f"{reference}: {f'{key}: ' if key else ''}{str(error).splitlines()[0]}"
        ) from error


def rule_of(reference: str, least: float, most: float) -> RewardRule:
    """Return the reward bounds of an episode. Raises: ConfigError: they are not in order."""
    if least >= most:
        raise ConfigError(f"{reference}: max_reward={most:g}: must be > min_reward={least:g}")
    return RewardRule(least=least, most=most)


def split_of(
    items: Sequence[Mapping[str, Any]], *, num_test: int, max_turns: int
) -> tuple[dict[str, list[int]], SubsetSpec]:
    """Return the positions of each split's items, and the split sizes.

    An item may name its `split`. If no item does, the last `num_test` are test items (-1: a tenth).
    """
    if any("split" in item for item in items):
        is_test = [item.get("split") == "test" for item in items]
    else:
        num = -(-len(items) // 10) if num_test < 0 else num_test
        is_test = [place >= len(items) - num for place in range(len(items))]
    places = {
        "train": [place for place, each in enumerate(is_test) if not each],
        "test": [place for place, each in enumerate(is_test) if each],
    }
    sizes = {name: len(found) for name, found in places.items()}
    subset = SubsetSpec(num_train=sizes["train"], num_test=sizes["test"], max_turns=max_turns)
    return places, subset


def run_coroutine(work: Callable[[], Coroutine[Any, Any, Found]], *, timeout_s: float) -> Found:
    """Return the result of a coroutine, even if an event loop is already running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result(timeout=timeout_s)


def parse_items(text: str, where: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON list or of JSON lines. Raises: ConfigError: neither format."""
    try:
        is_list = text.lstrip().startswith("[")
        lines = [line for line in text.splitlines() if line.strip()]
        items = json.loads(text) if is_list else [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: neither a JSON list nor JSON lines: {error}") from error
    wrong = [n for n, item in enumerate(items, 1) if not isinstance(item, dict)]
    if wrong or not items:
        raise ConfigError(
            f"{where}: {f'item {wrong[0]} is not an object' if wrong else 'no items'}"
        )
    return items


def optional_package(name: str, extra: str) -> ModuleType:
    """Return an optional package. Raises: ConfigError: it cannot be imported."""
    try:
        return import_module(name)
    except ImportError as error:
        missing = getattr(error, "name", None) or name
        is_absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{missing}.")
        problem = "is missing" if is_absent else f"cannot be imported ({error})"
        apart = PACKAGES_APART.get(extra)
        remedy = f"`pip install {apart or PACKAGES[extra]}`" + f" (the extra `{extra}`)" * (
            not apart
        )
        raise ConfigError(
            f"{name}: the Python package {problem}; install it with {remedy}"
        ) from error
