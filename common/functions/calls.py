"""Calls functions of the user in processes that can be ended, each call with a time limit.

A function may hang, or hold the interpreter's lock in a regular expression. That would stop all
episodes of a process, so no such function runs in the process of the episodes.
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, EnvFailure
from common.functions.process import (
    FunctionRefused,
    pack,
    package_root,
    receive_frame,
    send_frame,
    signature_of,
    unpack,
)
from common.host.child_process import ChildProcess
from common.repository import CODE, working_directory
from common.user_code import find_path

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("process.py")
NUM_WARM = max(1, min(4, os.cpu_count() or 1))  # Processes that are started without a wait.
MAX_PROCESSES = 32
MAX_SHARED = 64  # Asynchronous calls of one process at once.
START_TIMEOUT_S = 60.0  # Most seconds in which a process starts and loads its functions.
INTERRUPT_S = 0.5  # Seconds in which an interrupted call should end.
BUSY_S = 0.5  # Seconds until a call that waits for a free process starts another one.
WATCH_S = 0.5  # Seconds between two looks at a running call.
# Seconds without an answer to a ping after which a call blocks the event loop of its process.
FREEZE_S = 2.0
EXAMPLE_S = 10.0  # Most seconds of a call with an example before a run.
MAX_WAIT_S = 10.0  # Seconds in which a call waits for a free process.
# Seconds of a call beyond its limit: the wait, a frozen process, a repeated call, its interrupt.
OVERRUN_S = MAX_WAIT_S + 2 * (FREEZE_S + WATCH_S + INTERRUPT_S)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Ungraded(EnvFailure):
    """A call ended by its time limit, by its memory limit, or with its process."""


class ImportFailed(EnvFailure):
    """A function failed because a package is missing, or cannot be imported."""


class FunctionError(Exception):
    """The traceback of an error in the process of a function, for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function of the user with the keywords that it takes."""

    reference: str  # Value of the key: module:function or file.py:function.
    keywords: frozenset[str]  # The keywords that the signature names.
    needed: tuple[str, ...]  # The keywords without a default.
    takes_all: bool  # The signature has `**kwargs`.
    lists: frozenset[str] = frozenset()  # The keywords that are annotated as lists.
    is_async: bool = False
    module: str = ""
    file: str = ""  # Path of a module that is loaded by its file; "": by its name.
    name: str = ""
    load_s: float = 0.0  # Seconds in which its module was loaded, or may load.
    # A fast function that ships runs in the calling process. None: it needs a process of its own.
    function: Callable[..., Any] | None = None
    is_shipped: bool = False
    library: str = ""  # Package that its process imports before the first call.

    def chosen(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Return the offered keywords that the function takes."""
        if self.takes_all:
            return dict(offered)
        return {name: value for name, value in offered.items() if name in self.keywords}

    def as_load(self) -> dict[str, Any]:
        """Return the message with which a process loads the function."""
        return {
            "op": "load",
            "reference": self.reference,
            "module": self.module,
            "file": self.file,
            "name": self.name,
            "library": self.library,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The value of a call, and the metrics that the function logged."""

    value: Any
    logged: dict[str, float] = field(default_factory=dict[str, float])


def load_function(key: str, reference: str) -> UserFunction:
    """Return the function of `module:function` or `file.py:function`.

    Raises: ConfigError: the module or the function is missing, or the module fails.
    """
    module, colon, name = reference.rpartition(":")
    where = f"{key}={reference}"
    if not colon or not module or not name:
        raise ConfigError(f"{where}: expects module:function or file.py:function")
    file = ""
    if module.endswith(".py"):
        file = str(find_path(key, module).resolve())
    elif not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{where}: {module!r} is no module; a file ends with .py")
    unloaded = UserFunction(
        reference=reference,
        keywords=frozenset(),
        needed=(),
        takes_all=False,
        module=module,
        file=file,
        name=name,
    )
    began_s = time.monotonic()
    process = GraderProcess([unloaded])
    try:
        reply = process.load(unloaded)
    except Ungraded as error:
        raise ConfigError(f"{where}: {module} cannot be loaded: {error}") from error
    finally:
        process.end()
    if "missing" in reply:
        raise ConfigError(f"{where}: no module {module!r} (from {working_directory()})")
    if "refused" in reply:
        raise ConfigError(f"{where}: {reply['refused']}")
    return UserFunction(
        reference=reference,
        keywords=frozenset(reply["keywords"]),
        needed=tuple(reply["needed"]),
        takes_all=reply["takes_all"],
        lists=frozenset(reply["lists"]),
        is_async=reply["is_async"],
        module=module,
        file=file,
        name=name,
        load_s=time.monotonic() - began_s,
    )


def shipped_function(reference: str, function: Callable[..., Any], *, library: str) -> UserFunction:
    """Return a function of the product. One with a library may hang: it needs a process."""
    try:
        signature = signature_of(function)
    except FunctionRefused as error:
        raise AssertionError(f"{reference}: {error}") from error
    return UserFunction(
        reference=reference,
        keywords=frozenset(signature["keywords"]),
        needed=tuple(signature["needed"]),
        takes_all=signature["takes_all"],
        module=reference,
        file=inspect.getsourcefile(function) or "",
        name=function.__name__,
        function=None if library else function,
        is_shipped=True,
        library=library,
        # A library is loaded at the first call only, perhaps on a busy machine.
        load_s=START_TIMEOUT_S if library else 0.0,
    )


def check_keywords(where: str, user: UserFunction, offered: Mapping[str, Any]) -> None:
    """Raise ConfigError if the function needs a keyword that is not offered."""
    for name in user.needed:
        if name not in offered:
            raise ConfigError(
                f"{where}: the function needs {name!r}, which is not offered; the keywords are"
                f" {', '.join(offered)}"
            )


def check_imports(where: str, user: UserFunction, offered: Mapping[str, Any]) -> None:
    """Call a function of the user with an example, since it may import packages when it is called.

    Other errors, and a call that takes longer than `EXAMPLE_S`, are left to the run: an example is
    no real episode.

    Raises: ConfigError: an import fails; names the function and the package.
    """
    if user.is_shipped:
        return
    process = GraderProcess([user])
    try:
        process.load(user)
        process.call(user, user.chosen(offered), timeout_s=EXAMPLE_S, takes_logs=True)
    except ImportFailed as error:
        raise ConfigError(
            f"{where}: a call with an example fails: {error}; install the package where the"
            " function runs"
        ) from error
    except EnvFailure as error:
        logger.debug("a call with an example fails function=%s error=%s", where, error)
    finally:
        process.end()


class GraderProcess:
    """A process with the functions of a dataset. A thread of this process reads its replies.

    Example: asynchronous calls share a process, and one blocks its event loop. The process answers
    no ping, so a caller ends it. The callers repeat their calls alone in other processes.
    """

    def __init__(self, functions: Sequence[UserFunction]) -> None:
        """Start the process. It loads functions by `load`."""
        self.num_running = 0
        self.is_shared = False  # Its calls are asynchronous, and it takes further ones.
        self.failure = ""  # Why it has ended; "" while it is usable.
        self._replies: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # Protects `failure` and `_replies`.
        self._sending = threading.Lock()
        self._pinged_s = 0.0  # Time of a ping without an answer. 0: there is none.
        self._socket, theirs = socket.socketpair()
        files = [Path(each.file) for each in functions if each.file and not each.is_shipped]
        folders = [str(folder) for path in files for folder in (package_root(path), path.parent)]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        with theirs:
            argv = [sys.executable, str(PROGRAM), str(theirs.fileno()), str(CODE)]
            self._process = ChildProcess(
                "grader",
                [*argv, *dict.fromkeys((*folders, str(working_directory())))],
                env={
                    "PYTHONPATH": os.pathsep.join(p for p in paths if p and p != str(CODE)),
                    "PYTHONHASHSEED": "0",  # Equal calls have equal values in every process.
                },
                cwd=working_directory(),
                pass_fds=(theirs.fileno(),),
            )
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._socket)
        threading.Thread(target=_read, args=(weakref.ref(self), self._socket), daemon=True).start()

    def load(self, user: UserFunction) -> dict[str, Any]:
        """Return the signature of a function that the process has loaded, or why it has not.

        Raises: Ungraded: the process ended, or did not answer in time.
        """
        number, reply = self.register()
        self.send({**user.as_load(), "id": number})
        try:
            loaded = reply.result(START_TIMEOUT_S)
        except FutureTimeout as error:
            raise Ungraded(f"no answer within {START_TIMEOUT_S:g} s") from error
        if "lost" in loaded:
            raise Ungraded(loaded["lost"])
        return loaded

    def call(
        self,
        user: UserFunction,
        keywords: Mapping[str, Any],
        *,
        timeout_s: float,
        takes_logs: bool = False,
    ) -> Any:
        """Return the value of a call of a loaded function; the calling thread waits.

        Raises:
            EnvFailure: the function raised an error, or did not return in time.
            ImportFailed: the error is that of an import.
        """
        number, future = self.register()
        message = {"op": "call", "function": user.reference, "keywords": _packed(keywords)}
        self.send({**message, "state": None, "takes_logs": takes_logs, "id": number})
        try:
            reply = future.result(timeout_s)
        except FutureTimeout as error:
            self.end(f"no answer within {timeout_s:g} s, its time limit")
            raise Ungraded(self.failure) from error
        if "lost" in reply:
            raise Ungraded(reply["lost"])
        if "error" in reply:
            kind = ImportFailed if reply["is_import"] else EnvFailure
            raise kind(reply["error"]) from FunctionError(reply["trace"])
        return unpack(reply["value"])

    def register(self) -> tuple[int, Future[dict[str, Any]]]:
        """Return the number of a new message, and its reply.

        The reply is {"lost": reason} if the process ends.
        """
        reply: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            self._replies[number] = reply
        if self.failure:
            self.resolve({"id": number, "lost": self.failure})
        return number, reply

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. It blocks while the process reads nothing."""
        try:
            with self._sending:
                send_frame(self._socket, message)
        except OSError:
            self.end("it closed its connection")

    def ping(self) -> None:
        """Ask for a sign of life if none is awaited. It blocks while the process reads nothing."""
        if not self._pinged_s:
            self._pinged_s = time.monotonic()
            number, reply = self.register()
            reply.add_done_callback(self._note_pong)
            self.send({"op": "ping", "id": number})

    def _note_pong(self, _: object) -> None:
        self._pinged_s = 0.0

    @property
    def is_late(self) -> bool:
        """Whether a ping has no answer yet."""
        return self._pinged_s > 0

    @property
    def is_frozen(self) -> bool:
        """Whether a ping has had no answer for too long."""
        return self._pinged_s > 0 and time.monotonic() - self._pinged_s > FREEZE_S

    def resident_bytes(self) -> int:
        """Return the resident memory; 0 if the process has ended."""
        try:
            text = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii")
        except OSError:
            return 0
        return int(text.split()[1]) * PAGE_BYTES

    def end(self, failure: str = "it was ended") -> None:
        """Kill the process; its calls are lost. Later calls have no effect."""
        with self._lock:
            if self.failure:
                return
            code = self._process.poll()
            died = "" if code is None else f" (exit code {code})"
            self.failure = f"{failure}{died}"
        self._finalizer()
        for number in list(self._replies):
            self.resolve({"id": number, "lost": self.failure})

    def resolve(self, reply: dict[str, Any]) -> None:
        """Pass a reply to the message that it answers."""
        with self._lock:
            waiting = self._replies.pop(reply["id"], None)
        if waiting is not None:
            waiting.set_result(reply)


def _end_process(process: ChildProcess, connection: socket.socket) -> None:
    """Kill a process and close its socket."""
    process.kill()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    process.clear_away()


def _read(process: "weakref.ref[GraderProcess]", connection: socket.socket) -> None:
    """Pass the replies of a process to its callers until it ends."""
    while True:
        try:
            reply = receive_frame(connection)
        except (EOFError, OSError, ValueError):
            reply = None
        alive = process()
        if alive is None:
            return
        if reply is None:
            alive.end("it closed its connection")
            return
        alive.resolve(reply)
        del alive


class Caller:
    """Calls functions, each with a time limit, in a small pool of warm processes.

    An ordinary function has a process to itself during a call. Asynchronous functions share one;
    if its event loop stands still, it is ended, and its calls are repeated alone. So only a call
    that was alone is blamed.
    """

    def __init__(
        self,
        functions: Sequence[UserFunction] = (),
        *,
        memory_bytes: int = 4 << 30,
        busy_remedy: str = "raise data.max_workers",
    ) -> None:
        """Start no process yet.

        Args:
            busy_remedy: remedy in the error of a call that found no free process.
            memory_bytes: resident memory of all processes, above which no further one is started.
                A process above it is ended.
        """
        self._functions = [each for each in functions if each.function is None]
        self._memory_bytes = memory_bytes
        self._busy_remedy = busy_remedy
        self._processes: list[GraderProcess] = []
        self._num_starting = 0
        self._num_free = asyncio.Condition()
        self._threads = ThreadPoolExecutor(2 * MAX_SHARED, thread_name_prefix="grader")

    async def prepare(self) -> None:
        """Start the first process, so that no call waits for it. Raises: EnvFailure."""
        if self._functions and not self._processes and not self._num_starting:
            await self._start()

    async def call(
        self,
        user: UserFunction,
        offered: Mapping[str, Any],
        *,
        timeout_s: float,
        takes_logs: bool = False,
    ) -> Returned:
        """Return the value of a call. Changes of the keyword `state` reach the given dictionary.

        Raises:
            EnvFailure: the function raised an error.
            Ungraded: it did not return in time, or its process ended.
        """
        chosen = user.chosen(offered)
        if user.function is not None:
            return Returned(value=_value_here(user.function, chosen))
        state: dict[str, Any] | None = chosen.pop("state", None)
        message = {
            "op": "call",
            "function": user.reference,
            "keywords": _packed(chosen),
            "state": None if state is None else _packed(state),
            "takes_logs": takes_logs,
        }
        reply = await self._attempt(message, is_shared=user.is_async, timeout_s=timeout_s)
        if reply is None:
            reply = await self._attempt(message, is_shared=False, timeout_s=timeout_s)
        assert reply is not None  # A call that was alone has a reply, or raises.
        if "error" in reply:
            raise EnvFailure(reply["error"]) from FunctionError(reply["trace"])
        if state is not None:
            state.update({name: unpack(value) for name, value in reply["changed"].items()})
            for name in reply["removed"]:
                state.pop(name, None)
        return Returned(value=unpack(reply["value"]), logged=reply["logged"])

    async def _attempt(
        self, message: dict[str, Any], *, is_shared: bool, timeout_s: float
    ) -> dict[str, Any] | None:
        """Return the reply to a call; None: its process ended because of another call.

        Raises: Ungraded: the call ended its process, or did not return in time.
        """
        process = await self._take(is_shared=is_shared)
        try:
            return await self._watched(process, message, timeout_s)
        except asyncio.CancelledError:  # The function still runs, so the process is not free.
            self._discard(process)
            asyncio.get_running_loop().run_in_executor(self._threads, process.end)
            raise
        finally:
            process.num_running -= 1
            process.is_shared = process.is_shared and process.num_running > 0
            if process.failure:
                self._discard(process)
            async with self._num_free:
                self._num_free.notify()

    def _discard(self, process: GraderProcess) -> None:
        """Give no further calls to a process."""
        if process in self._processes:
            self._processes.remove(process)

    async def _watched(
        self, process: GraderProcess, message: dict[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        """Return the reply to a call of a process that has a place for it; see `_attempt`."""
        loop = asyncio.get_running_loop()
        number, future = process.register()
        loop.run_in_executor(self._threads, process.send, {**message, "id": number})
        reply = asyncio.wrap_future(future)
        began_s = time.monotonic()
        was_alone = process.num_running == 1
        cause = ""
        while not cause and not reply.done():
            left_s = max(0.0, began_s + timeout_s - time.monotonic())
            await asyncio.wait([reply], timeout=min(left_s, WATCH_S))
            was_alone = was_alone and process.num_running == 1
            if process.resident_bytes() > self._memory_bytes:
                cause = f"its process held more than {self._memory_bytes / 2**30:.1f} GiB"
            elif not left_s:
                cause = f"no answer within {timeout_s:g} s, its time limit"
                interrupt = {"op": "interrupt", "id": -1, "call": number}
                loop.run_in_executor(self._threads, process.send, interrupt)
                await asyncio.wait([reply], timeout=INTERRUPT_S)
                if reply.done() and "lost" not in reply.result():
                    raise Ungraded(cause)
            elif process.num_running > 1:
                loop.run_in_executor(self._threads, process.ping)
                cause = "another call blocked its process" if process.is_frozen else ""
        if cause and not reply.done():
            await loop.run_in_executor(self._threads, process.end, cause)
        result = reply.result() if reply.done() else await reply
        if "lost" not in result:
            return result
        if was_alone:
            raise Ungraded(result["lost"])
        return None

    async def _take(self, *, is_shared: bool) -> GraderProcess:
        """Return a process with a place for a call, which is counted. Raises: EnvFailure."""
        waited_s = 0.0  # Seconds in which no process was starting.
        while True:
            process = self._free(is_shared=is_shared)
            if process is not None:
                process.is_shared = is_shared
                process.num_running += 1
                return process
            num = len(self._processes) + self._num_starting
            is_starting = self._num_starting > 0
            if waited_s > MAX_WAIT_S and not is_starting:
                text = f"all {num} processes of functions were busy for {waited_s:.0f} s"
                raise EnvFailure(f"{text}; {self._busy_remedy}")
            # A process that loads a large library must not make the waiting calls start others.
            is_late = waited_s > BUSY_S and not is_starting
            if num < NUM_WARM or (is_late and num < MAX_PROCESSES and self._has_memory()):
                await self._start()
                continue
            began_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BUSY_S), self._num_free:
                    await self._num_free.wait()
            if not is_starting:
                waited_s += time.monotonic() - began_s

    def _free(self, *, is_shared: bool) -> GraderProcess | None:
        """Return a process with a place for a call; None: all are busy."""
        usable = [each for each in self._processes if not each.failure]
        if is_shared:
            for process in usable:
                if process.is_shared and process.num_running < MAX_SHARED and not process.is_late:
                    return process
        return next((each for each in usable if not each.num_running), None)

    def _has_memory(self) -> bool:
        """Return whether one more process fits into the memory."""
        sizes = [each.resident_bytes() for each in self._processes]
        return sum(sizes) + max(sizes, default=0) < self._memory_bytes

    async def _start(self) -> None:
        """Add a process with all functions. Raises: EnvFailure: one cannot be loaded."""
        self._num_starting += 1
        try:
            loop = asyncio.get_running_loop()
            process = await loop.run_in_executor(self._threads, start_process, self._functions)
        finally:
            self._num_starting -= 1
        self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()
        self._processes.clear()
        self._threads.shutdown(wait=False)


def start_process(functions: Sequence[UserFunction]) -> GraderProcess:
    """Return a process that has loaded functions. Raises: EnvFailure: one cannot be loaded."""
    process = GraderProcess(functions)
    try:
        for user in functions:
            reply = process.load(user)
            if "missing" in reply or "refused" in reply:
                why = reply.get("refused") or f"no module {reply['missing']!r}"
                raise EnvFailure(f"{user.reference} cannot be loaded: {why}")
    except Ungraded as error:  # No call was made, so no time limit of a call was reached.
        process.end()
        raise EnvFailure(f"the functions' process cannot start: {error}") from error
    except BaseException:
        process.end()
        raise
    return process


def _packed(value: Mapping[str, Any]) -> Any:
    """Return keywords in types of JSON. Raises: EnvFailure: one cannot leave this process."""
    try:
        return pack(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvFailure(f"the keywords: {error}") from error


def _value_here(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """Return the value of a fast function that ships. Raises: EnvFailure: it raised an error."""
    try:
        return function(**keywords)
    except Exception as error:
        raise EnvFailure(f"{type(error).__name__}: {error}") from error
