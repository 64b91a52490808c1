"""The user's cache folder of this project."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder; it need not exist yet."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(own) / "longstride"
