"""Folder and version of the product's own code."""

import functools
import os
import subprocess
import tomllib
from collections.abc import MutableMapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # The folder of run.py; processes are started in it.

GIT_TIMEOUT_S = 5.0
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


def git_revision() -> str:
    """Return the commit of the code, with "+changes" for a modified tree; "" outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--dirty=+changes"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@functools.cache
def code_name() -> str:
    """Return a name of the code that this process runs, for peers: its commit, or its version."""
    return f"commit {revision}" if (revision := git_revision()) else f"version {product_version()}"
