"""Laws of servers of others that are killed in the middle of training, with the real packages."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from common.wire.messages import EndReason, Trajectory
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run, balances
from tests.envhub.interop.test_mcp_package import MCP, SERVER, described, http_server
from tests.envhub.interop.test_openenv_package import echo_command, listening
from tests.venvs import python_with

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

AT_ONCE = 16  # episodes of the smoke run
DOWN_S = 4.0
STEP_S = 0.2  # so that there are always episodes in the middle


def ended(run: Run, name: str) -> None:
    """See a run to its end: what failed has failed by the server's name, and is not much."""
    assert run.wait() == 0, run.output[-3_000:]
    assert run.left_over() == []
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert (ledger["version"], ledger["in_flight"]) == (4, 0)
    failed = failures(run)
    causes = ledger["causes"]
    left_alone = causes.get("failed:group_damaged", 0)  # ended well, in a failed group
    assert 1 <= len(failed) == causes["failed:env_error"] <= 2 * AT_ONCE, causes
    assert ledger["failed"] == len(failed) + left_alone, causes
    assert {each.end_reason for each in failed} == {EndReason.ENV_ERROR}
    assert all(name in each.error and each.reward == 0 for each in failed), failed[0].error


def failures(run: Run) -> list[Trajectory]:
    played = [each for _, each in read_journal(run.root / "journal")]
    return [each for each in played if each.end_reason.is_infrastructure_failure]


def at_step(run: Run, num: int, is_busy: Callable[[], bool]) -> None:
    """Wait until so many steps are made and the server is in the middle of episodes."""
    run.wait_until(lambda: len(run.metrics()) >= num and is_busy())


def test_training_survives_a_killed_openenv_server(tmp_path: Path) -> None:
    command, url = echo_command(tmp_path)
    environment = tmp_path / "echo_env" / "server" / "echo_env_environment.py"
    begins = "        self._state.step_count += 1\n"
    slow = f"        __import__('time').sleep({STEP_S})\n"
    environment.write_text(
        environment.read_text(encoding="utf-8").replace(begins, begins + slow), encoding="utf-8"
    )
    where = ["env.dialect=openenv", f"env.url={url}", "tasks=[{env: openenv, subset: all}]"]
    told = ["env.observation_field=echoed_message", "train.num_steps=4", "eval.num_items=2"]
    with listening(command, tmp_path, url) as server:
        run = Run(tmp_path, *where, *told)
        with run:
            held = psutil.Process(server.pid)
            at_step(run, 1, lambda: len(held.net_connections()) > AT_ONCE // 2)
            server.kill()
            time.sleep(DOWN_S)
            with listening(command, tmp_path, url):
                ended(run, f"OpenEnv server {url}")


SLOWLY = f"""
@server.tool()
async def slowly(answer: str, session: str = "") -> dict:
    await __import__("anyio").sleep({STEP_S})
    return length(answer)

if __name__"""
SLOW_SERVER = SERVER.replace("\nif __name__", SLOWLY)


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
@pytest.mark.parametrize("is_on_pipes", [True, False], ids=["pipes", "http"])
def test_training_survives_a_killed_mcp_server(
    revision: str, is_on_pipes: bool, tmp_path: Path
) -> None:
    options: dict[str, object] = {"items": "tool:listed", "submit": "slowly", "begin": "begin"}
    options |= {"plain_answers": True, "session": "session", "revision": revision}
    program, python = tmp_path / "server.py", python_with(MCP, sees_ours=True)
    program.write_text(SLOW_SERVER, encoding="utf-8")
    with ExitStack() as stack:
        url = "" if is_on_pipes else stack.enter_context(http_server(tmp_path, text=SLOW_SERVER))
        reference = described(tmp_path, **options, **({"url": url} if url else {}))
        where = [f"envhub.envs=[{reference}]", "tasks=[{env: tools, subset: all}]"]
        told = ["train.num_steps=4", "eval.num_items=2"]
        run = stack.enter_context(Run(tmp_path, *where, *told, python=python))
        at_step(run, 1, lambda: len(serving(program)) == 1)
        (first,) = serving(program)
        first.kill()
        time.sleep(DOWN_S)
        if url:
            port = urlsplit(url).port or 0
            stack.enter_context(http_server(tmp_path, text=SLOW_SERVER, port=port))
        ended(run, f"MCP server {url}" if url else "server.py")


def serving(program: Path) -> list[psutil.Process]:
    """Return the processes that run a server's program."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # The process may have ended already.
            found += [process] if str(program) in process.cmdline() else []
    return found
