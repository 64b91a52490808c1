"""Laws of the network with a list of allowed hosts."""

import asyncio
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Address

import pytest

from envhub.sandbox.containers import Containers
from envhub.sandbox.interface import (
    AllowedHosts,
    Sandbox,
    SandboxFailed,
    SandboxRequest,
    parse_host,
)
from envhub.sandbox.network import Gateway
from tests.envhub.envs.terminal.container_tasks import BASE
from tests.envhub.envs.terminal.test_containers import ENGINE, OPTIONS, own_address, problem

REFUSED, NAME_ERROR = 1, 3
FETCH = "(exec 3<>/dev/tcp/{}/{}; echo you >&3; cat <&3) 2>/dev/null | grep . || echo closed"


@pytest.mark.parametrize(
    "host",
    [
        *("http://x.org", "x.org/path", "x.org:443", "", "*", "*.", "a..b", "-a.org", "*.1.2.3.4"),
        *("10.0.0.1/8", "10.0.0.300", "::1", "fd00::/8", "127.0.0.1", "127.0.0.0/8", "x*.org"),
    ],
)
def test_malformed_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"is neither a name|is no name|own loopback"):
        parse_host(host)


@pytest.mark.parametrize(
    ("hosts", "name", "is_allowed"),
    [
        (["pypi.org"], "pypi.org", True),
        (["PyPI.org."], "pypi.org", True),
        (["pypi.org"], "evil-pypi.org", False),
        (["pypi.org"], "pypi.org.evil.org", False),
        (["pypi.org"], "files.pypi.org", False),
        (["*.pypi.org"], "files.pypi.org", True),
        (["*.pypi.org"], "a.b.pypi.org", True),
        (["*.pypi.org"], "pypi.org", False),
        ([], "pypi.org", False),
        (["*"], "any.org", True),
        # The resolver of the C library reads the first one as evil.org.
        (["*.pypi.org"], "evil.org\0.pypi.org", False),
        (["*"], "evil.org\0", False),
        (["*.pypi.org"], "a..pypi.org", False),
        (["*.pypi.org"], ".pypi.org", False),
        (["*.pypi.org"], "a b.pypi.org", False),
    ],
)
def test_name_is_allowed_by_its_whole_labels(
    hosts: Sequence[str], name: str, is_allowed: bool
) -> None:
    assert AllowedHosts(hosts).permits_name(name) is is_allowed


def test_address_is_allowed_by_its_network_alone() -> None:
    allowed = AllowedHosts(["10.1.0.0/16", "8.8.8.8", "x.org"])
    seen = {
        text: allowed.permits_address(IPv4Address(text))
        for text in ("10.1.255.1", "10.2.0.1", "8.8.8.8", "8.8.8.9")
    }
    assert list(seen.values()) == [True, False, True, False]


@pytest.mark.parametrize(
    ("hosts", "address", "is_far"),
    [
        (["*"], "10.0.0.1", True),
        (["*"], "127.0.0.1", False),
        (["*"], "0.0.0.0", False),
        (["*"], "169.254.169.254", False),
        (["0.0.0.0/0"], "10.0.0.1", True),
        (["0.0.0.0/0"], "127.0.0.1", False),
        (["0.0.0.0/0"], "169.254.169.254", False),
        (["169.254.169.254"], "169.254.169.254", True),
        (["169.254.169.254"], "169.254.169.253", False),
    ],
)
def test_own_services_of_the_machine_are_out_of_reach(
    hosts: Sequence[str], address: str, is_far: bool
) -> None:
    allowed = AllowedHosts(hosts)
    assert allowed.is_far(IPv4Address(address)) is is_far
    assert allowed.permits_address(IPv4Address(address)) is is_far


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nft") is None, reason="needs root, and the program nft"
)


@contextmanager
def namespace(command: str = "true") -> Iterator[int]:
    """Yield a process in a network namespace of its own, after a command in it."""
    argv = ["unshare", "--net", "sh", "-c", f"{command} && echo ready && exec sleep 60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def in_namespace(pid: int, *argv: str) -> str:
    words = ["nsenter", "--target", str(pid), "--net", *argv]
    return subprocess.run(words, capture_output=True, encoding="utf-8", check=True).stdout


@needs_root
@pytest.mark.slow
def test_gateway_leaves_a_namespace_with_a_network_as_it_is() -> None:
    # The pid of a container of another machine's daemon can be that of any process here.
    with namespace("ip link set lo up && ip route add 192.0.2.0/24 dev lo") as pid:
        with pytest.raises(SandboxFailed, match="or of another machine"):
            asyncio.run(Gateway(AllowedHosts([])).open(pid))
        assert "default" not in in_namespace(pid, "ip", "route", "show", "table", "all")
        assert in_namespace(pid, "nft", "list", "tables") == ""
    # The hub itself can be in a container without a network.
    code = "import asyncio, os; from envhub.sandbox.network import *; "
    code += "asyncio.run(Gateway(AllowedHosts([])).open(os.getpid()))"
    argv = ["unshare", "--net", sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", check=False)
    assert "or of another machine" in done.stderr


@needs_root
@pytest.mark.slow
def test_flood_of_connections_resolves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envhub.sandbox.interface.MAX_TUNNELS", 2)
    names: list[str] = []

    async def slow(name: str) -> list[str]:
        names.append(name)
        if len(names) > 1:
            await asyncio.sleep(60.0)
        return [own_address()]

    flood = "import socket; socket.setdefaulttimeout(60)\n"
    flood += "clients = [socket.create_connection(('127.66.0.2', 80)) for _ in range(2)]\n"
    flood += "for _ in range(7):\n"  # A reset may come before `connect` returns.
    flood += " try: print(socket.create_connection(('127.66.0.2', 80)).recv(1))\n"
    flood += " except ConnectionResetError: print('reset')\n"

    async def work(pid: int) -> str:
        gateway = Gateway(AllowedHosts(["x.org"]), slow)
        await gateway.open(pid)
        try:
            await gateway.answer_to(question("x.org"))
            return await asyncio.to_thread(in_namespace, pid, sys.executable, "-c", flood)
        finally:
            gateway.close()

    with namespace() as pid:
        assert asyncio.run(work(pid)).split() == ["reset"] * 7
    assert names == ["x.org"] * 3


def question(name: str, kind: int = 1) -> bytes:
    """Return a question of DNS with the number 0x1234."""
    labels = b"".join(bytes([len(each)]) + each.encode() for each in name.split("."))
    return bytes.fromhex("123401000001000000000000") + labels + struct.pack("!BHH", 0, kind, 1)


async def resolved(name: str) -> list[str]:
    if name == "lost.org":
        raise OSError("no such name")
    return ["127.0.0.1"] if name == "near.org" else [own_address()]


def test_name_server_knows_allowed_names_only() -> None:
    async def codes(*questions: bytes) -> list[tuple[int, bytes]]:
        gateway = Gateway(AllowedHosts(["x.org", "lost.org", "*.wide.org"]), resolved)
        replies = [await gateway.answer_to(each) for each in questions]
        assert all(reply[:2] == b"\x12\x34" and reply[2] & 0x80 for reply in replies)
        # Flags, numbers of questions and answers; the last four bytes are the address.
        return [(reply[3] & 15, reply[4:8] + reply[-4:]) for reply in replies]

    first, again, capitals, ipv6, other, cut, lost, broken = asyncio.run(
        codes(
            question("x.org"),
            question("x.org"),
            question("X.oRG"),
            question("x.org", 28),
            question("y.org"),
            question("y.org\0.wide.org"),
            question("lost.org"),
            question("x.org")[:15],
        )
    )
    assert first == again == capitals == (0, b"\0\1\0\1" + IPv4Address("127.66.0.2").packed)
    assert (ipv6[0], ipv6[1][:4]) == (0, b"\0\1\0\0")
    assert (other[0], cut[0], lost[0], broken[0]) == (*[NAME_ERROR] * 3, REFUSED)


@asynccontextmanager
async def server(host: str) -> AsyncIterator[int]:
    """Serve the received line with a greeting, and yield the port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        await writer.drain()
        writer.close()

    serving = await asyncio.start_server(greet, host, 0)
    async with serving:
        yield serving.sockets[0].getsockname()[1]


async def fetched(sandbox: Sandbox, host: str, port: int) -> str:
    """Return the answer of a server, or `closed`."""
    argv = ["bash", "-c", FETCH.format(host, port)]
    result = await sandbox.exec(argv, timeout_s=120.0, max_output_bytes=2000)
    return result.text.strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_container_reaches_allowed_hosts_alone() -> None:
    if reason := problem():
        pytest.skip(reason)

    async def work() -> None:
        address = own_address()
        allowed = AllowedHosts([address])
        request = SandboxRequest(image=BASE, folder="/", allowed=allowed)
        async with server(address) as port, server("127.0.0.1") as inner:
            sandbox = await Containers(OPTIONS).create(request)
            try:
                assert await fetched(sandbox, address, port) == "hello you"
                assert await fetched(sandbox, "1.1.1.1", port) == "closed"
                # The machine's own loopback, and ports of the gateway itself.
                for host, closed in (("127.0.0.1", inner), ("localhost", 39054)):
                    assert await fetched(sandbox, host, closed) == "closed"
                allowed.change(["x.invalid", "localhost"])
                assert await fetched(sandbox, address, port) == "closed"
                assert await fetched(sandbox, "x.invalid", port) == "closed"
                assert await fetched(sandbox, "localhost", inner) == "closed"
                # A command over its time starts the container again. The gateway stays.
                allowed.change([address])
                late = await sandbox.exec(["sleep", "60"], timeout_s=1.0, max_output_bytes=9)
                assert late.ended_by == "timeout"
                assert await fetched(sandbox, address, port) == "hello you"
            finally:
                await sandbox.delete()

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_names_of_allowed_hosts_reach_their_servers_only() -> None:
    if reason := problem():
        pytest.skip(reason)

    async def work() -> None:
        address = own_address()
        argv = [ENGINE, "run", "--detach", "--network", "none", BASE, "sleep", "infinity"]
        name = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout
        gateway = Gateway(AllowedHosts(["x.org", "near.org"]), resolved)
        try:
            argv = [ENGINE, "inspect", "--format", "{{.State.Pid}}", name.strip()]
            pid = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout
            await gateway.open(int(pid))
            async with server(address) as port, server("127.0.0.1") as near:
                hosts = (("x.org", port), ("near.org", near), ("y.org", port), (address, port))
                answers = [await answer_in(name.strip(), host, to) for host, to in hosts]
            assert answers == ["hello you", "closed", "closed", "closed"]
        finally:
            gateway.close()
            subprocess.run([ENGINE, "rm", "--force", name.strip()], capture_output=True, check=True)

    asyncio.run(work())


async def answer_in(container: str, host: str, port: int) -> str:
    process = await asyncio.create_subprocess_exec(
        *(ENGINE, "exec", container, "bash", "-c", FETCH.format(host, port)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return output.decode().strip()
