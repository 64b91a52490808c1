"""Refuses to continue a run whose items are other ones than before, or on another hub."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from common.store.run_dir import write_json
from envhub.catalogue.registry import Registry
from envhub.env import REVISION

FILE = "item_digests.json"  # Below the run directory.
SHOWN = 12  # Digits of a digest that a message shows.


def contents_of(registry: Registry) -> dict[str, dict[str, str]]:
    """Return the digests of the environments that have any, by environment and key."""
    contents = {name: dict(registry.spec(name).content) for name in registry.names}
    return {name: content for name, content in contents.items() if content}


def digests_of(contents: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return one digest of each environment, by which the scheduler compares hubs."""
    digests: dict[str, str] = {}
    for env, content in contents.items():
        compared = [each for each in sorted(content.items()) if not each[0].startswith(REVISION)]
        digests[env] = hashlib.sha256(json.dumps(compared).encode()).hexdigest()
    return digests


def changed_content(folder: Path, contents: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the changes since the run began, one line each; [] for a new run.

    Args:
        folder: the run directory.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    recorded: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    lines: list[str] = []
    for env, content in contents.items():
        before = recorded.get(env, content)
        lines += [
            f"{env}: {key} changed since the run began (sha256 {before.get(key, 'none')[:SHOWN]},"
            f" now {content.get(key, 'none')[:SHOWN]}); restore it, or begin another run with"
            " run.name=NAME"
            for key in dict.fromkeys([*before, *content])
            if before.get(key) != content.get(key) and not key.startswith(REVISION)
        ]
    return lines


def record_content(folder: Path, contents: Mapping[str, Mapping[str, str]]) -> None:
    """Write the digests of environments that the run directory does not have yet."""
    path = folder / FILE
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if contents.keys() - recorded.keys():
        write_json(path, {**contents, **recorded}, indent=1)
