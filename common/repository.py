"""Folder and version of the product's own code."""

import functools
import os
import tomllib
from collections.abc import MutableMapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # The folder of run.py; processes are started in it.

# Variable with the working directory of the command, for processes that are started in ROOT.
STARTED_FROM = "LONGSTRIDE_STARTED_FROM"


def note_working_directory(environ: MutableMapping[str, str]) -> None:
    """Keep the working directory of a command before the process changes to ROOT."""
    here = Path.cwd()
    if here != ROOT:
        environ[STARTED_FROM] = str(here)


def working_directory() -> Path:
    """Return the working directory of the command that started this process."""
    return Path(os.environ.get(STARTED_FROM) or Path.cwd())


@functools.cache
def product_version() -> str:
    """Return the version of the code that this process runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])
