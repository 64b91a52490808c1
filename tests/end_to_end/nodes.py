"""Machines of their own on this one: a network namespace and a view of the disk for each node."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.end_to_end.runs import REPOSITORY

STOP_S = 20.0
HIDDEN = REPOSITORY / "configs" / "policies"  # the models, which only the run's machine has


SOURCE, DESTINATION = 34, 36  # of a TCP port in a frame: behind 14 bytes of Ethernet, 20 of IPv4


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True, capture_output=True, timeout=10)


def why_not() -> str:
    """Return why this machine cannot create nodes, or "" if it can."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "ip or unshare is not installed"
    name = f"ls{os.getpid()}try"
    try:
        ip("netns", "add", name)
        ip("link", "add", name[:15], "type", "bridge")
        ip("link", "del", name[:15])
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
    return ""


class Network:
    """A switch in this machine's own namespace; `host` is its address there."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.name = f"lsn{number}"
        self.host = f"10.77.{number}.1"

    def __enter__(self) -> "Network":
        ip("link", "add", self.name, "type", "bridge")
        ip("addr", "add", f"{self.host}/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        ip("link", "del", self.name)

    @contextmanager
    def node(self, index: int, folder: Path, *, hidden: Path) -> Iterator["Node"]:
        """A node on the switch that does not see the `hidden` folder, nor the models."""
        name = f"{self.name}n{index}"
        with ExitStack() as stack:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(ip, "link", "del", name)  # sockets that linger keep a namespace alive
            ip("link", "set", name, "master", self.name, "up")
            host = f"10.77.{self._number}.{10 + index}"
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            node = Node(name, host, folder, hidden)
            try:
                yield node
            finally:
                node.stop()


class Node:
    """One machine without the run's disk."""

    def __init__(self, name: str, host: str, folder: Path, hidden: Path) -> None:
        self.name = name
        self.host = host
        self._hidden = hidden
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def cut(self) -> None:
        """Take the link down: no packet passes, and no route is left."""
        ip("-n", self.name, "link", "set", "eth0", "down")

    def heal(self) -> None:
        ip("-n", self.name, "link", "set", "eth0", "up")

    def swallow(self, port: int) -> None:
        """Let every packet to and from a port vanish on the switch; all others pass."""
        tc("qdisc", "add", "dev", self.name, "clsact")
        for direction, offset in (("ingress", DESTINATION), ("egress", SOURCE)):
            code = f"4,40 0 0 {offset},21 0 1 {port},6 0 0 2,6 0 0 0"  # drops where it is equal
            bpf = ("bpf", "direct-action", "bytecode", code)
            tc("filter", "add", "dev", self.name, direction, *bpf)

    def carry(self) -> None:
        """Undo `swallow`."""
        tc("qdisc", "del", "dev", self.name, "clsact")

    def take(self, key: Path) -> Path:
        """Copy a key file here, as a user would; return where it is."""
        self.folder.mkdir(exist_ok=True)
        own = self.folder / "the.key"
        shutil.copyfile(key, own)
        own.chmod(0o600)
        return own

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `run.py` here; what it prints is in `log`."""
        self.folder.mkdir(exist_ok=True)
        hide = " && ".join(f"mount -t tmpfs none '{path}'" for path in (self._hidden, HIDDEN))
        command = f'{hide} && test -z "$(ls {self._hidden})" && exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", command, "sh"]
        environ = {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [*inside, sys.executable, "run.py", *arguments],
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def kill(self) -> None:
        """Lose the machine: no goodbye, no packet."""
        self.cut()
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_S)

    def stop(self) -> None:
        """End what still runs here, by process id."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(STOP_S)
