"""Laws of hostile commands: the hub, its other sessions and the host stay untouched."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection, TerminalOptions
from envhub import main
from tests.envhub.sandbox.boxes import LIMITS, OPTIONS, need_bubblewrap

pytestmark = [pytest.mark.long, pytest.mark.timed, pytest.mark.timeout(900)]
MIB = 1 << 20
COMMAND_S = 8.0
ATTACKS = {
    "fork bomb": ":(){ :|:& };: ; sleep 3",
    "fork bomb that ignores signals": (
        "trap '' TERM HUP INT; f() { while :; do (f &) ; done; }; f & sleep 600"
    ),
    "memory of one process": "python3 -c 'x = []\nwhile 1: x.append(bytearray(1 << 20))'",
    "memory of many processes": (
        "for i in $(seq 12); do"
        " python3 -c 'import time; x = b\"x\" * (40 << 20); time.sleep(600)' & done; wait"
    ),
    "memory in files": "for d in /tmp /dev/shm ~ /tests /logs .; do cat /dev/zero > $d/x; done",
    "disk": "for d in /app /tmp /; do dd if=/dev/zero of=$d/$RANDOM bs=1M count=10000; done",
    "many files": "i=0; while :; do mkdir $i; touch $i/{1..99}; i=$((i + 1)); done",
    "1 GB of output": "head -c 1000000000 /dev/zero | tr '\\0' x",
    "endless output": "yes",
    "ignored SIGTERM": "trap '' TERM INT HUP QUIT; while :; do sleep 600; done",
    "processes that outlive their shell": "setsid nohup sleep 600 & setsid sleep 600 & sleep 600",
    "kill all": "kill -KILL -1; kill -KILL 1; sleep 1",
    "network": "for a in 127.0.0.1/22 127.0.0.1/80 1.1.1.1/80; do (: > /dev/tcp/$a); done",
    "host's /proc": "cat /proc/1/{environ,mem} /proc/kcore /proc/sysrq-trigger; ls /proc",
    "kernel settings": "cd /proc; echo 1 > sys/kernel/panic; echo c > sysrq-trigger; mount x ~",
    "new namespaces": "unshare -Urm sh -c 'mount -t tmpfs none /tmp; cat /dev/zero > /tmp/x'",
}


@contextmanager
def hub(options: EnvsSection) -> Iterator[str]:
    """Yield the address of a hub with terminal tasks and another environment."""
    app, sessions = main.build(
        ["terminal", "textcraft"],
        EnvhubSection(),
        token=None,
        options=options,
        remote=RemoteOptions(),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = main.uvicorn.Config(app, loop="uvloop", log_config=None, access_log=False)
        server = main.DrainingServer(config, sessions)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class AttackSession:
    """One session of the hub."""

    def __init__(self, http: aiohttp.ClientSession, path: str) -> None:
        self._http = http
        self._path = path
        self._seq = 0

    @classmethod
    async def open(cls, http: aiohttp.ClientSession, env: str, item: str) -> "AttackSession":
        async with http.post("/v1/sessions", json={"env": env, "item_id": item}) as answer:
            assert answer.status == 201, await answer.text()
            return cls(http, f"/v1/sessions/{(await answer.json())['session_id']}")

    async def step(self, action: str) -> dict[str, Any]:
        self._seq += 1
        body = {"action": action, "seq": self._seq}
        async with self._http.post(f"{self._path}/step", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


class HostWatch:
    """The most memory and processes of all sandboxes during an attack."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self.most_processes = 0

    def measure(self) -> None:
        """Measure once. Pages that processes share count once."""
        inside = psutil.Process().children(recursive=True)
        total = 0
        for each in inside:
            with contextlib.suppress(psutil.Error):
                total += each.memory_full_info().pss
        self.most_bytes = max(self.most_bytes, total)
        self.most_processes = max(self.most_processes, len(inside))

    async def watch(self) -> None:
        while True:
            await asyncio.to_thread(self.measure)
            await asyncio.sleep(0.02)


async def attacked(url: str, command: str) -> dict[str, float]:
    """Return what the host and other sessions notice of an attack."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        attacker = await AttackSession.open(http, "terminal", "tasks-train-0")
        other = await AttackSession.open(http, "terminal", "tasks-train-1")
        quick = await AttackSession.open(http, "textcraft", "depth1-train-0")
        idle = HostWatch()
        idle.measure()
        disk = shutil.disk_usage("/").free
        host = HostWatch()
        watching = asyncio.create_task(host.watch())
        began_s = time.monotonic()
        attack = asyncio.create_task(attacker.step(command))
        waits: list[float] = []
        while not attack.done():
            asked_s = time.monotonic()
            assert (await other.step("echo ok"))["observation"] == "ok"
            await quick.step("inventory")
            waits.append(time.monotonic() - asked_s)
            await asyncio.sleep(0.05)
        took_s = time.monotonic() - began_s
        await attack
        assert (await attacker.step("echo alive"))["observation"].endswith("alive")
        watching.cancel()
        last = await attacker.step("submit")
        assert (last["done"], last["reward"]) == (True, 0.0)
        return {
            "seconds": took_s,
            "memory_mib": (host.most_bytes - idle.most_bytes) / MIB,
            "processes": host.most_processes - idle.most_processes,
            "disk_mib": (disk - shutil.disk_usage("/").free) / MIB,
            "slowest_s": max(waits, default=0.0),
        }


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_leaves_hub_sessions_and_host_untouched(name: str) -> None:
    need_bubblewrap()
    terminal = TerminalOptions(command_timeout_s=COMMAND_S, max_turns=1000)
    with hub(EnvsSection(sandbox=OPTIONS, terminal=terminal)) as url:
        found = asyncio.run(attacked(url, ATTACKS[name]))
    print(json.dumps({"name": name, **found}))  # noqa: T201 - `pytest -s` shows the figures.
    assert found["processes"] <= LIMITS.processes + 8  # The other sandbox runs commands, too.
    assert found["memory_mib"] <= 2 * LIMITS.memory_bytes / MIB + 64
    left = [p for p in psutil.Process().children(recursive=True) if p.name() in ("bwrap", "yes")]
    assert psutil.wait_procs(left, timeout=60)[1] == []
