"""Folders and version of the product's own code, in a checkout or in an installation."""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import MutableMapping
from pathlib import Path

NAME = "longstride"
GIT_TIMEOUT_S = 5.0
# Variable with the working directory of the command, for its child processes.
STARTED_FROM = "LONGSTRIDE_STARTED_FROM"

# Variable with the name of the program for child processes, if it is the console script.
STARTED_AS = "LONGSTRIDE_STARTED_AS"
SCRIPT = re.compile(r"(?<![\w./-])(?:(?:\.venv/bin/)?python )?run\.py(?![\w/-]|\.\w)")
# In the second form, one extra contains all that is missing.
SETUP = re.compile(r"`make (?:clean )?setup`(?: \(the extra `(?P<extra>[\w-]+)`\))?")

CODE = Path(__file__).resolve().parents[1]  # The folder of run.py and configs/.
IS_CHECKOUT = (CODE / "pyproject.toml").is_file()
# Relative paths begin here, and processes are started here: the checkout, or the working directory
# of the command of an installed package.
ROOT = CODE if IS_CHECKOUT else Path(os.environ.get(STARTED_FROM) or Path.cwd())


def note_working_directory(environ: MutableMapping[str, str]) -> None:
    """Keep the working directory of a command before the process changes to ROOT."""
    here = Path.cwd()
    if not IS_CHECKOUT:
        environ[STARTED_FROM] = str(ROOT)
    elif here != ROOT:
        environ[STARTED_FROM] = str(here)
    if Path(sys.argv[0]).name == NAME:
        environ[STARTED_AS] = NAME


def with_program_name(text: str) -> str:
    """Return a text with the program's name as it was started, in place of `python run.py`.

    The texts of the product name the script of a checkout. An installed package has the console
    script, and extras instead of `make setup`.
    """
    if IS_CHECKOUT and os.environ.get(STARTED_AS) != NAME:
        return text
    named = SCRIPT.sub(NAME, text)
    return named if IS_CHECKOUT else SETUP.sub(_install_of_extra, named)


def _install_of_extra(setup: re.Match[str]) -> str:
    """Return the command that installs an extra; pip takes the package itself as installed."""
    if extra := setup["extra"]:
        return f"`pip install '{NAME}[{extra}]'`"
    return f"`pip install '{NAME}[cpu]'` (with a GPU: `[gpu]`)"


def working_directory() -> Path:
    """Return the working directory of the command that started this process."""
    return Path(os.environ.get(STARTED_FROM) or Path.cwd())


def shipped(path: str) -> str:
    """Return a path below configs/ of an installed package, if the working directory has none."""
    is_shipped = path.startswith("configs/") and not (ROOT / path).exists()
    return str(CODE / path) if is_shipped and (CODE / path).exists() else path


@functools.cache
def product_version() -> str:
    """Return the version of the code that this process runs."""
    if not IS_CHECKOUT:
        return importlib.metadata.version(NAME)
    project = tomllib.loads((CODE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def git_revision() -> str:
    """Return the commit of the code, with "+changes" for a modified tree; "" outside of git."""
    if not IS_CHECKOUT:
        return ""
    command = ["git", "-C", str(CODE), "describe", "--always", "--abbrev=40"]
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
