"""The user's cache folder of this project."""

from pathlib import Path

from common.host.surroundings import cache_home


def cache_folder() -> Path:
    """Return the folder; it need not exist yet."""
    return cache_home() / "longstride"
