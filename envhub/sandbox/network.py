"""The network of containers whose task allows some hosts: a gateway in the hub's process."""

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from envhub.sandbox.interface import AllowedHosts, SandboxFailed

NAMED = IPv4Network("127.66.0.0/16")  # Addresses in the container that stand for names.
DNS_PORT, TCP_PORT = 39053, 39054  # Of the gateway in the container's network.
START_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 20.0
MAX_NAMES = 60_000
MAX_QUESTIONS = 256
CHUNK_BYTES = 1 << 16
TTL_S = 5
TYPE_A = 1
NO_ERROR, FORMAT_ERROR, NO_NAME = 0, 1, 3  # Codes of answers of a name server.
SO_ORIGINAL_DST = 80
# All connections of the container lead to the gateway. A route makes all addresses its own.
RULES = f"""table inet longstride {{
 chain out {{
  type nat hook output priority -100; policy accept;
  udp dport 53 redirect to :{DNS_PORT}
  ip daddr {NAMED} meta l4proto tcp redirect to :{TCP_PORT}
  ip daddr != 127.0.0.0/8 meta l4proto tcp redirect to :{TCP_PORT}
 }}
}}
"""
# Runs in the network namespace of a container, and sends its sockets to the hub's process. With a
# daemon of another machine the number may name any process here, whose network stays as it is.
BINDER = """
import os, socket, subprocess, sys
channel = socket.socket(fileno=int(sys.argv[1]))
dns, tcp, rules, outside = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
with open("/proc/self/net/route", encoding="ascii") as file:
    num_routes = len(file.readlines()) - 1
if os.stat("/proc/self/ns/net").st_ino == outside or num_routes > 0:
    sys.exit("the process is not of a container without a network, or of another machine")
names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names.bind(("127.0.0.1", dns))
connections = socket.create_server(("127.0.0.1", tcp), backlog=512)
for words, text in (
    (["ip", "link", "set", "lo", "up"], ""),
    (["ip", "route", "add", "local", "0.0.0.0/0", "dev", "lo"], ""),
    (["nft", "-f", "-"], rules),
):
    subprocess.run(words, input=text, encoding="utf-8", check=True)
socket.send_fds(channel, [b"."], [names.fileno(), connections.fileno()])
"""
Resolve = Callable[[str], Coroutine[object, object, list[str]]]
# A name server that does not answer takes these threads, and none of the hub's other work.
THREADS = ThreadPoolExecutor(16, "resolver")


async def resolve(name: str) -> list[str]:
    """Return the IPv4 addresses of a name, as the machine resolves it. Raises: OSError."""
    loop = asyncio.get_running_loop()
    entries = await loop.run_in_executor(THREADS, _entries_of, name)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _entries_of(name: str) -> list[Any]:
    return socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)


class Gateway(asyncio.DatagramProtocol):
    """The only way out of a network namespace: a name server, and a relay of TCP connections.

    The containers have no network but their loopback. The gateway's sockets lie there, and its
    connections to hosts start in the namespace of the hub.

    Example: the agent asks for `host.org`. If it is allowed, the name server answers with an
    address of NAMED that stands for the name. The kernel leads a connection with this address to
    the relay, which connects to the host's own address and copies the bytes of both directions.
    A connection to another name or address is reset. UDP reaches no host.
    """

    def __init__(self, allowed: AllowedHosts, resolve: Resolve = resolve) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._addresses: dict[str, IPv4Address] = {}
        self._names: dict[IPv4Address, str] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, pid: int) -> None:
        """Open the sockets in the network namespace of a process. Raises: SandboxFailed."""
        names, connections = await _sockets_of(pid)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=names)
        self._server = await asyncio.start_server(self._relay, sock=connections)

    def close(self) -> None:
        """Close the sockets and all connections."""
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self._allowed.change([])

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer a question for a name. More than MAX_QUESTIONS at a time are dropped."""
        if len(self._tasks) >= MAX_QUESTIONS:
            return
        task = asyncio.get_running_loop().create_task(self._answer(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = await self.answer_to(data)
        if reply and self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(reply, addr)

    async def answer_to(self, data: bytes) -> bytes:
        """Return the answer to a question of DNS; b"" to what is none. Source: RFC 1035."""
        if len(data) < 12 or data[2] & 0x80:
            return b""
        try:
            name, kind, question = _question_of(data)
        except (IndexError, struct.error, UnicodeDecodeError, ValueError):
            return _answer(data, b"", FORMAT_ERROR, None)
        if not self._allowed.permits_name(name):
            return _answer(data, question, NO_NAME, None)
        try:
            await self._resolve(name)
        except OSError:
            return _answer(data, question, NO_NAME, None)
        address = self._address_of(name)
        return _answer(data, question, NO_ERROR, address if kind == TYPE_A else None)

    def _address_of(self, name: str) -> IPv4Address | None:
        """Return the address that stands for a name; None: there are too many."""
        if name not in self._addresses and len(self._addresses) < MAX_NAMES:
            address = NAMED[len(self._addresses) + 2]
            self._addresses[name] = address
            self._names[address] = name
        return self._addresses.get(name)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a connection of the container with its host, or reset it."""
        ends = contextlib.suppress(OSError, asyncio.CancelledError)
        with ends, self._allowed.connection() as is_free:
            connection = writer.get_extra_info("socket")
            # The close of a refused connection is a reset, not an empty answer.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            addresses, port = await self._target(connection) if is_free else ([], 0)
            if addresses:
                await _copy_both(reader, writer, addresses, port)
        writer.transport.abort()

    async def _target(self, connection: socket.socket) -> tuple[list[str], int]:
        """Return the addresses of a connection's host, and its port; [] if none is allowed."""
        packed = connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        port, address = struct.unpack("!2xH4s8x", packed)
        address = IPv4Address(address)
        name = self._names.get(address)
        if name is None:
            return [str(address)] * self._allowed.permits_address(address), port
        if not self._allowed.permits_name(name):
            return [], port
        addresses = await self._resolve(name)
        return [each for each in addresses if self._allowed.is_far(IPv4Address(each))], port


def _question_of(data: bytes) -> tuple[str, int, bytes]:
    """Return the name and the type of a question, and its bytes. Raises: ValueError and others."""
    labels: list[str] = []
    place = 12
    while size := data[place]:
        if size > 63 or place > 300:
            raise ValueError("a name of a question has no pointers")
        labels.append(data[place + 1 : place + 1 + size].decode("ascii").lower())
        place += 1 + size
    kind, _ = struct.unpack_from("!HH", data, place + 1)
    return ".".join(labels), kind, data[12 : place + 5]


def _answer(data: bytes, question: bytes, code: int, address: IPv4Address | None) -> bytes:
    """Return an answer of DNS with at most one address."""
    flags = 0x8080 | (data[2] & 0x01) << 8 | code
    header = data[:2] + struct.pack("!HHHHH", flags, bool(question), address is not None, 0, 0)
    record = b""
    if address is not None:
        record = struct.pack("!HHHIH", 0xC00C, TYPE_A, 1, TTL_S, 4) + address.packed
    return header + question + record


async def _copy_both(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, addresses: Sequence[str], port: int
) -> None:
    """Copy bytes between a connection and the first address that answers. Raises: OSError."""
    for place, address in enumerate(addresses):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far_writer = await asyncio.open_connection(address, port)
            break
        except OSError:
            if place == len(addresses) - 1:
                raise
    try:
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        await writer.drain()
    finally:
        far_writer.transport.abort()
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    writer.close()
    await writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until its end. Raises: OSError."""
    while content := await reader.read(CHUNK_BYTES):
        writer.write(content)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _sockets_of(pid: int) -> tuple[socket.socket, socket.socket]:
    """Return the gateway's sockets in the network namespace of a process. Raises: SandboxFailed."""
    missing = [name for name in ("nsenter", "ip", "nft") if shutil.which(name) is None]
    if missing:
        raise SandboxFailed(
            f"a network with allowed hosts needs {' and '.join(missing)}; run apt-get install"
            " util-linux iproute2 nftables"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    # Without root, the namespaces of rootless containers belong to the hub's user.
    rights = ["--user", "--preserve-credentials"] if os.geteuid() else []
    outside = str(os.stat("/proc/self/ns/net").st_ino)
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(pid), "--net", *rights, "--", sys.executable, "-I", "-c"),
            *(BINDER, str(theirs.fileno()), str(DNS_PORT), str(TCP_PORT), RULES, outside),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise SandboxFailed(
                f"the gateway of the allowed hosts did not start within {START_TIMEOUT_S:g} s"
            ) from error
        if process.returncode != 0:
            text = output.decode("utf-8", errors="replace").strip()[-300:]
            raise SandboxFailed(
                f"the gateway of the allowed hosts cannot start: {text}; it needs root, or"
                " containers of podman without root, an engine of this machine, and the kernel's"
                " nftables"
            )
        _, files, _, _ = socket.recv_fds(ours, 1, 2)
    names, connections = (socket.socket(fileno=file) for file in files)
    names.setblocking(False)
    connections.setblocking(False)
    return names, connections
