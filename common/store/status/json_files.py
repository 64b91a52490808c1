"""Reads JSON files that other processes write."""

import json
from pathlib import Path
from typing import Any, cast


def as_map(found: object) -> dict[str, Any]:
    """Return a JSON object unchanged, {} for any other value."""
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if the file is missing or has another content."""
    try:
        return as_map(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
