"""The user's cache folder of this project."""

from pathlib import Path

from common.host.process_settings import cache_home


def cache_folder() -> Path:
    """Return the path of the folder, which may not exist yet."""
    return cache_home() / "longstride"
