"""Laws of hostile commands in containers: the hub, its other sessions and the host stay whole."""

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from common.config.envs import ContainerOptions, EnvsSection, SandboxOptions, TerminalOptions
from envhub.sandbox.containers import is_alive
from tests.envhub.envs.terminal.container_tasks import write_task
from tests.envhub.envs.terminal.test_containers import ENGINE, owners, problem
from tests.envhub.sandbox.test_attacks import ATTACKS, COMMAND_S, AttackSession, hub

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PERL = "perl -e 'my @x; while (1) { push @x, \"y\" x (1 << 20) }'"
OTHERS = {  # Debian's base image has no Python.
    "memory of one process": PERL,
    "memory of many processes": f"for i in $(seq 12); do {PERL} & done; wait",
}
OPTIONS = EnvsSection(
    sandbox=SandboxOptions(
        backend=ENGINE,
        start_timeout_s=300.0,
        containers=ContainerOptions(processes=64, disk_mib=64, max_files=2000),
    ),
    terminal=TerminalOptions(command_timeout_s=COMMAND_S, max_turns=1000),
)


async def attacked(url: str, command: str) -> None:
    """Attack in one session, and assert that the others continue."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        attacker = await AttackSession.open(http, "terminal", "tasks-train-0")
        other = await AttackSession.open(http, "terminal", "tasks-train-1")
        quick = await AttackSession.open(http, "textcraft", "depth1-train-0")
        attack = asyncio.create_task(attacker.step(command))
        while not attack.done():
            assert (await other.step("echo ok"))["observation"] == "ok"
            await quick.step("inventory")
            await asyncio.sleep(0.05)
        await attack
        assert (await attacker.step("echo alive"))["observation"].endswith("alive")
        last = await attacker.step("submit")
        assert (last["done"], last["reward"]) == (True, 0.0)
        last = await other.step("submit")
        assert (last["done"], last["reward"]) == (True, 0.0)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_in_a_container_leaves_hub_sessions_and_host_whole(
    name: str, tmp_path: Path
) -> None:
    if reason := problem():
        pytest.skip(reason)
    for task in ("no-python", "deep-folder"):
        write_task(tmp_path, task)
        settings = tmp_path / task / "task.toml"
        text = settings.read_text(encoding="utf-8").replace("storage_mb = 512", "storage_mb = 64")
        settings.write_text(text, encoding="utf-8")
    options = replace(OPTIONS, terminal=replace(OPTIONS.terminal, train=str(tmp_path)))
    with hub(options) as url:
        asyncio.run(attacked(url, OTHERS.get(name, ATTACKS[name])))
    # Other runs on this machine may have containers; those of ended processes are this hub's.
    assert not [owner for owner in owners() if not is_alive(owner)]
