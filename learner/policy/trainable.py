"""Refusal of checkpoints whose weights training cannot change: those of a quantised network.

A learner changes numbers by small steps, and it sends them under the names of the checkpoint.
Quantised weights have coarse steps, other names and scales beside them.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from common.errors import ConfigError

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")
NARROW = ("F4", "F6", "F8")  # Beginnings of the names of dtypes in the headers of weight files.


def check_trainable(folder: Path, *, key: str = "model.path", shown: str = "") -> None:
    """Check that the weights of a checkpoint are numbers of 16 or 32 bits.

    Args:
        key: configuration key that names the folder.
        shown: value of the key; "" is the folder.

    Raises: ConfigError: the weights are quantised; names the method and the remedy.
    """
    method = _method_of(_config_in(folder)) or next(_narrow_weights(folder), "")
    if method:
        raise ConfigError(
            f"{key}={shown or folder}: the weights are quantised ({method}), and training cannot"
            " change quantised weights. Use the checkpoint of this model in bf16, without"
            f" {KEYS[0]} in its {CONFIG}"
        )


def _method_of(config: Mapping[str, Any]) -> str:
    """Return the method by which a configuration, or its section for text, is quantised; or ""."""
    for section in (config, *_inner(config)):
        for name in KEYS:
            found: object = section.get(name)
            if isinstance(found, dict) and found:
                tree = cast(dict[str, object], found)
                return str(tree.get("quant_method") or tree.get("quant_algo") or name)
    return ""


def _inner(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sections of a configuration for other networks, such as the one for text."""
    for name, value in config.items():
        if name.endswith("_config") and name not in KEYS and isinstance(value, dict):
            yield cast(dict[str, Any], value)


def _narrow_weights(folder: Path) -> Iterator[str]:
    """Yield the name and the dtype of weights with 8 bits or fewer."""
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header_of(path).items():
            dtype = str(entry.get("dtype", ""))
            if dtype.startswith(NARROW):
                yield f"{name} has the dtype {dtype}"


def _header_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the header of a weight file, {} of a damaged one, which other checks report."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            tree = json.loads(file.read(size))
    except (OSError, ValueError, struct.error):
        return {}
    return {name: entry for name, entry in tree.items() if name != "__metadata__"}


def _config_in(folder: Path) -> dict[str, Any]:
    """Return config.json, {} if it is missing or damaged, which other checks report."""
    try:
        tree: object = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], tree) if isinstance(tree, dict) else {}
