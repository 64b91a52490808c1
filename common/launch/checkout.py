"""Another checkout of the code for the hubs and actors of a run, from their next start on."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from common.store.run_dir import RunDir

logger = logging.getLogger(__name__)

ROLES = ("envhub", "actor")  # The scheduler and the learner change with the launcher.


def other_checkout(run_dir: RunDir, name: str) -> tuple[str, str] | None:
    """Return the interpreter and the run.py with which a role starts; None: the launcher's own.

    The file `code` of the run directory has the path of the checkout. Its own environment in
    `.venv` is used if there is one.
    """
    if name.partition("-")[0] not in ROLES or not run_dir.code.is_file():
        return None
    root = Path(run_dir.code.read_text(encoding="utf-8").strip())
    if not (root.is_absolute() and (root / "run.py").is_file()):
        logger.error(
            "%s: %r is no absolute path of a checkout, so role=%s starts from this one",
            run_dir.code,
            str(root),
            name,
        )
        return None
    python = root / ".venv" / "bin" / "python"
    return str(python) if python.exists() else sys.executable, str(root / "run.py")


def command_of(argv: Sequence[str], run_dir: RunDir, name: str) -> tuple[str, ...]:
    """Return a role's command, from another checkout if the run directory names one."""
    found = other_checkout(run_dir, name)
    if found is None:
        return tuple(argv)
    logger.info("role=%s starts from %s", name, found[1])
    return (*found, *absolute_dir(argv[2:], run_dir))


def absolute_dir(words: Sequence[str], run_dir: RunDir) -> list[str]:
    """Return arguments with an absolute `run.dir`: a relative one is below the checkout."""
    given = f"run.dir={run_dir.root.absolute().parent}"
    return [given if word.startswith("run.dir=") else word for word in words]
