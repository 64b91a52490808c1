"""Sandboxes of bubblewrap with small limits, for tests."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import psutil
import pytest

from common.config.envs import SandboxOptions
from envhub.sandbox.bubblewrap import Bubblewrap
from envhub.sandbox.interface import MIB, CommandResult, Sandbox, SandboxLimits, SandboxRequest

LIMITS = SandboxLimits(
    memory_bytes=96 * MIB,
    processes=16,
    open_files=64,
    max_files=500,
    file_bytes=4 * MIB,
    disk_bytes=8 * MIB,
)
OPTIONS = SandboxOptions(
    memory_mib=96,
    processes=16,
    open_files=64,
    max_files=500,
    file_mib=4,
    disk_mib=8,
    start_timeout_s=300.0,
)
SLEEPER = "sleep 600 & until pgrep -x sleep; do :; done"  # It runs when the command ends.
PATIENT_S = 120.0  # Time limit of commands that end by themselves.


@cache
def _problem() -> str:
    return Bubblewrap(OPTIONS).problem()


def need_bubblewrap() -> None:
    """Skip the test, with the reason, if no sandbox can start here."""
    if problem := _problem():
        pytest.skip(problem)


def processes_of_this() -> set[psutil.Process]:
    """Return all processes that this test's process has started, its earlier tests' ones too."""
    return set(psutil.Process().children(recursive=True))


def in_sandbox(work: Callable[[Sandbox], Awaitable[Any]], *, folder: str = "/app") -> Any:
    """Return the result of work in a new sandbox."""

    async def perform() -> Any:
        request = SandboxRequest(limits=LIMITS, folder=folder)
        sandbox = await Bubblewrap(OPTIONS).create(request)
        try:
            return await work(sandbox)
        finally:
            await sandbox.delete()

    return asyncio.run(perform())


async def shell(
    sandbox: Sandbox, command: str, *, timeout_s: float = PATIENT_S, **options: Any
) -> CommandResult:
    """Return the result of a shell command."""
    return await sandbox.exec(
        ["bash", "-c", command], timeout_s=timeout_s, max_output_bytes=10_000, **options
    )


def results_of(commands: Sequence[str], **options: Any) -> list[CommandResult]:
    """Return the results of shell commands in one sandbox."""

    async def work(sandbox: Sandbox) -> list[CommandResult]:
        return [await shell(sandbox, each, **options) for each in commands]

    return in_sandbox(work)
