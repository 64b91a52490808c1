"""Folder and version of the product's own code."""

import functools
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # The folder of run.py; processes are started in it.


@functools.cache
def product_version() -> str:
    """Return the version of the code that this process runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])
