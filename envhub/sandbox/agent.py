"""The first process of a sandbox: runs commands and enforces limits. It is sent as text.

It needs only the standard library of Python 3.8. It reads requests from its standard input and
writes replies to its standard output, each as a length of four bytes and JSON. It ends with its
input, and its end ends all processes of its process namespace.

As process 1 it receives no signal of the other processes, and it permits no tracing. A filter
refuses system calls that name it. So the commands can neither stop it, nor slow it down, nor change
its replies.

The same text is a second program: `confine` runs a command without access to some folders, and
without power over processes that it did not start.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import stat
import sys
import time
from typing import Any, NoReturn

TICK_S = 0.05  # Interval between two measurements of memory and files.
# Files that a command can create in a sandbox above its limit, such as the state of its shell.
SPARE_FILES = 8
CHUNK_BYTES = 1 << 16
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
INSTRUCTION_BYTES = 8  # Size of one instruction of a filter.
# System calls and flags of Landlock. They are the same on all machines.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_APPLY = 444, 445, 446
LANDLOCK_VERSION_FLAG = 1
PATH_BENEATH = 1
FILE_RIGHTS = 0b111  # Execute, write and read a file.
FOLDER_RIGHTS = 0b1111111111111  # These and those of folders.
REFER, TRUNCATE = 1 << 13, 1 << 14  # Since versions 2 and 3: link to another folder, truncate.
SCOPES = 0b11  # Since version 6: no abstract socket and no signal beyond the command's processes.
CANNOT_RUN = 126  # Exit code of a shell whose command cannot run.
OUT_OF_MEMORY = b"1000"  # The kernel ends these processes before any other.
NICENESS = 10  # The processes of the hub have priority.
DEFAULT_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Tail:
    """The first and the last bytes of an output; the middle of a long one is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.half = max(1, max_bytes // 2)
        self.head = bytearray()
        self.tail = bytearray()
        self.num_bytes = 0

    def add(self, chunk: bytes) -> None:
        """Append output; drop bytes between the first and the last ones."""
        self.num_bytes += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:] if room > 0 else chunk
        if len(self.tail) > self.half:
            del self.tail[: len(self.tail) - self.half]


class Agent:
    """Reads requests and performs one after the other."""

    def __init__(self, limits: dict[str, Any], libc: Any) -> None:
        self.limits = limits
        self.libc = libc
        self.max_files: int = limits["max_files"]
        self.selector = selectors.DefaultSelector()
        self.buffer = bytearray()
        self.selector.register(0, selectors.EVENT_READ)
        awake, self.wake = os.pipe()
        for fd in (awake, self.wake):
            os.set_blocking(fd, False)
        self.awake = awake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.selector.register(awake, selectors.EVENT_READ)
        self.watched = 0  # Process id of the running command.
        self.code: int | None = None  # Its exit code, negative for a signal.
        self.discarded: set[int] = (
            set()
        )  # Outputs of background processes, which are read and dropped.

    def serve(self) -> NoReturn:
        """Answer requests until the process is killed."""
        self.send({"ready": True, "python": sys.version.split()[0]})
        while True:
            request = self.request()
            try:
                reply = getattr(self, "do_" + request["op"])(request)
            except OSError as error:
                reply = {"refused": error.strerror or type(error).__name__, "errno": error.errno}
            except ValueError as error:  # A path with a NUL character or a lone surrogate.
                reply = {"refused": ascii(str(error)), "errno": errno.EINVAL}
            self.send(reply)

    def send(self, reply: dict[str, Any]) -> None:
        """Write a reply with its length to standard output."""
        text = json.dumps(reply).encode()
        view = memoryview(len(text).to_bytes(4, "big") + text)
        while view:
            view = view[os.write(1, view) :]

    def request(self) -> dict[str, Any]:
        """Return the next request; meanwhile, enforce the limits on background processes."""
        while True:
            if len(self.buffer) >= 4:
                end = 4 + int.from_bytes(self.buffer[:4], "big")
                if len(self.buffer) >= end:
                    text = bytes(self.buffer[4:end])
                    del self.buffer[:end]
                    return json.loads(text)
            self.wait(TICK_S if self.has_processes() else None)
            if self.has_processes() and self.violation():
                self.kill_all()

    def wait(self, timeout_s: float | None) -> list[int]:
        """Handle what happens within the timeout, and return the readable outputs."""
        readable: list[int] = []
        for key, _ in self.selector.select(timeout_s):
            if key.fd == 0:
                chunk = os.read(0, CHUNK_BYTES)
                if not chunk:
                    os._exit(0)  # The hub has ended.
                self.buffer += chunk
            elif key.fd == self.awake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.awake, CHUNK_BYTES)
            elif key.fd in self.discarded:
                if not self.take(key.fd, None):
                    self.forget(key.fd)
            else:
                readable.append(key.fd)
        self.reap()
        return readable

    def take(self, fd: int, tail: Tail | None) -> bool:
        """Read an output once. Return False at its end."""
        try:
            chunk = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if tail is not None:
            tail.add(chunk)
        return bool(chunk)

    def forget(self, fd: int) -> None:
        """Stop reading an output."""
        self.selector.unregister(fd)
        self.discarded.discard(fd)
        os.close(fd)

    def has_processes(self) -> bool:
        """Return whether processes of the commands still run."""
        return self.reap() or bool(self.discarded)

    def reap(self) -> bool:
        """Collect ended processes. Return whether others run."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            if pid == self.watched:
                self.code = code

    def kill_all(self) -> None:
        """End all processes but this one."""
        while self.reap():
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            time.sleep(0.005)
        for fd in list(self.discarded):
            self.forget(fd)

    def violation(self) -> str:
        """Return the limit that is exceeded: memory or files; "" if none."""
        most = self.limits["memory_bytes"]
        # The exact measurement is slow, and never larger.
        if self.memory(is_exact=False) > most and self.memory(is_exact=True) > most:
            return "memory"
        if self.num_files() > self.max_files:
            return "files"
        return ""

    def memory(self, *, is_exact: bool) -> int:
        """Return the resident bytes of all processes; if exact, shared pages count once."""
        total = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                with contextlib.suppress(OSError, IndexError, ValueError):
                    total += self.exact(name) if is_exact else self.resident(name)
        return total

    def resident(self, name: str) -> int:
        """Return the resident bytes of a process."""
        with open(f"/proc/{name}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES

    def exact(self, name: str) -> int:
        """Return the bytes of a process, with its share of shared pages."""
        try:
            with open(f"/proc/{name}/smaps_rollup", "rb") as file:
                lines = [line.split() for line in file]
            return sum(int(line[1]) << 10 for line in lines if line[0] == b"Pss:")
        except OSError:
            return self.resident(name)

    def num_files(self) -> int:
        """Return the number of files in the writable folders."""
        total = 0
        for folder in self.limits["folders"]:
            with contextlib.suppress(OSError):
                usage = os.statvfs(folder)
                total += usage.f_files - usage.f_ffree
        return total

    def do_exec(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a command to its end, to its time limit, or to a limit of the sandbox."""
        began_s = time.monotonic()
        self.max_files = max(self.limits["max_files"], self.num_files() + SPARE_FILES)
        output = self.start(request)
        tail = Tail(request["max_output"])
        end = self.follow(output, tail, began_s + request["seconds"])
        if end or not request["keep"]:
            self.kill_all()
        self.drain(output, tail)
        return {
            "code": -int(signal.SIGKILL) if self.code is None else self.code,
            "end": end or "exit",
            "head": base64.b64encode(tail.head).decode(),
            "tail": base64.b64encode(tail.tail).decode(),
            "num_bytes": tail.num_bytes,
            "seconds": time.monotonic() - began_s,
        }

    def follow(self, output: int, tail: Tail, deadline_s: float) -> str:
        """Read the output until the command ends. Return the limit that it exceeded, or ""."""
        self.selector.register(output, selectors.EVENT_READ)
        measured_s = 0.0
        while self.code is None:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return "timeout"
            if now_s - measured_s >= TICK_S:
                measured_s = now_s
                violation = self.violation()
                if violation:
                    return violation
            for fd in self.wait(TICK_S):
                if fd == output and not self.take(fd, tail):
                    self.selector.unregister(fd)  # The command has closed its output.
        return ""

    def drain(self, output: int, tail: Tail) -> None:
        """Read the rest of the output. A background process may write more, which is dropped."""
        deadline_s = time.monotonic() + 1.0
        is_open = True
        while is_open and time.monotonic() < deadline_s:
            before = tail.num_bytes
            is_open = self.take(output, tail)
            if is_open and tail.num_bytes == before:
                break
        registered = output in self.selector.get_map()
        if is_open and self.reap():
            if not registered:
                self.selector.register(output, selectors.EVENT_READ)
            self.discarded.add(output)
        else:
            if registered:
                self.selector.unregister(output)
            os.close(output)

    def start(self, request: dict[str, Any]) -> int:
        """Start a command and return the descriptor of its output."""
        self.code = None
        output, child_output = os.pipe()
        failed, error_pipe = os.pipe()
        os.set_blocking(output, False)
        try:
            pid = os.fork()
        except OSError:
            for fd in (output, child_output, failed, error_pipe):
                os.close(fd)
            raise
        if pid == 0:
            self.become(request, child_output, error_pipe)
        self.watched = pid
        os.close(child_output)
        os.close(error_pipe)
        with os.fdopen(failed, "rb") as file:
            number = file.read()
        if number:
            os.close(output)
            raise OSError(int(number), os.strerror(int(number)))
        return output

    def become(self, request: dict[str, Any], output: int, error_pipe: int) -> NoReturn:
        """Turn this forked process into the command. It never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for number in DEFAULT_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self.libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            os.setsid()
            self.limit()
            nothing = os.open("/dev/null", os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            os.chdir(request["folder"])
            os.execvpe(request["argv"][0], request["argv"], request["variables"])
        except OSError as error:
            os.write(error_pipe, str(error.errno).encode())
        except ValueError:
            os.write(error_pipe, str(errno.EINVAL).encode())
        os._exit(127)

    def limit(self) -> None:
        """Set the limits of this process, which its children inherit."""
        os.nice(NICENESS)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
            file.write(OUT_OF_MEMORY)
        limits = self.limits
        for kind, value in (
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_AS, 2 * limits["memory_bytes"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            _, most = resource.getrlimit(kind)
            if most != resource.RLIM_INFINITY:
                value = min(value, most)
            resource.setrlimit(kind, (value, value))

    def do_write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write a regular file and its folders."""
        path = request["path"]
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
        flags |= os.O_APPEND if request["append"] else os.O_TRUNC
        fd = os.open(path, flags, request["mode"])
        with os.fdopen(fd, "wb", buffering=0) as file:
            self.check_regular(fd)
            view = memoryview(base64.b64decode(request["content"]))
            while view:
                view = view[file.write(view) :]
            os.fchmod(fd, request["mode"])
        return {}

    def do_read(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the first bytes of a regular file, and its size."""
        fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            size = self.check_regular(fd)
            content = file.read(request["max_bytes"])
        return {"content": base64.b64encode(content).decode(), "size": max(size, len(content))}

    def check_regular(self, fd: int) -> int:
        """Return the size of a regular file. A pipe or a device could block or never end."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def do_kill(self, _: dict[str, Any]) -> dict[str, Any]:
        """End all processes of the commands."""
        self.kill_all()
        return {}


class FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`: a system call filter."""

    _fields_ = [("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(libc: Any, filters: dict[str, str]) -> None:
    """Apply this machine's system call filter to this process and its children. Raises: OSError."""
    content = base64.b64decode(filters.get(os.uname().machine, ""))
    if not content:
        return
    program = FilterProgram(len(content) // INSTRUCTION_BYTES, content)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the system call filter: {os.strerror(number)}")


class PathRule(ctypes.Structure):
    """The kernel's `struct landlock_path_beneath_attr`: rights below a folder."""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def close_folders(libc: Any, closed: list[str]) -> None:
    """Refuse this process and its children the folders, which lie in the root folder.

    With Landlock the kernel also refuses them to trace or signal processes outside of this domain.
    Raises: OSError: the kernel lacks Landlock.
    """

    def call(number: int, *arguments: Any) -> int:
        result = libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    version = call(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG)
    files = FILE_RIGHTS | (TRUNCATE if version >= 3 else 0)
    folders = FOLDER_RIGHTS | files | (REFER if version >= 2 else 0)
    rules = [folders, 0, SCOPES] if version >= 6 else [folders]
    content = (ctypes.c_uint64 * len(rules))(*rules)
    ruleset = call(LANDLOCK_CREATE, content, ctypes.c_size_t(ctypes.sizeof(content)), 0)
    for name in os.listdir("/"):
        path = f"/{name}"
        if path in closed or os.path.islink(path):
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = PathRule(folders if os.path.isdir(path) else files, opened)
        call(LANDLOCK_ADD, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(opened)
    call(LANDLOCK_APPLY, ruleset, 0)
    os.close(ruleset)


def confine(settings: dict[str, Any], argv: list[str]) -> NoReturn:
    """Become a command without access to folders, variables and other processes."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(PermissionError):  # It leads a group of processes already.
        os.setsid()
    try:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        close_folders(libc, settings["folders"])
        install_filter(libc, settings["filters"])
    except OSError as error:
        sys.stderr.write(
            f"{error.strerror}: no program runs without rights here; this needs Linux"
            " 5.13 with Landlock\n"
        )
        sys.exit(CANNOT_RUN)
    environment = {k: v for k, v in os.environ.items() if k not in settings["variables"]}
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else CANNOT_RUN)


def main() -> NoReturn:
    """Run a command without rights, or serve as the sandbox's first process."""
    settings = json.loads(sys.argv[1])
    if sys.argv[2:]:
        confine(settings, sys.argv[2:])
    if os.getpid() != 1:
        sys.exit("the sandbox's first process must have the process id 1")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    install_filter(libc, settings["filters"])
    Agent(settings, libc).serve()


if __name__ == "__main__":
    main()
