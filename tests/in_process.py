"""A command line that is carried out in the process of its test, which saves all imports."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from unittest import mock

import pytest

import run
from common.repository import ROOT

# Without this variable a hub replaces its process, which is the one of the tests.
KEEPS_PROCESS = {"PYTHONMALLOC": "malloc"}


@dataclass(frozen=True, slots=True)
class Done:
    """The exit code and the output of a command line."""

    returncode: int | str | None
    stdout: str
    stderr: str


def carry_out(
    argv: list[str], capsys: pytest.CaptureFixture[str], *, environ: Mapping[str, str] | None = None
) -> Done:
    """Run `run.py` with these arguments; the environment and the directory stay as they were.

    Args:
        environ: changes of the environment.
    """
    capsys.readouterr()
    with (
        mock.patch.dict(os.environ, KEEPS_PROCESS | dict(environ or {})),
        mock.patch(
            "tools.checks.environments.configure_logging"
        ),  # It would replace the handlers of pytest.
        contextlib.chdir(ROOT),
    ):
        try:
            code = run.main(argv)
        except SystemExit as ended:  # For example of argparse after `--help`.
            code = ended.code or 0
    out, err = capsys.readouterr()
    return Done(code, out, err)
