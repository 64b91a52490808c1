"""Runs the tests of a program inside a sandbox. It is sent as text and needs Python 3.8.

It reads {"program", "setup", "head", "entry_point", "tested", "tests",
"seconds", "mark", "runner"} from the file of its
first argument and removes the file. The line "MARK begins" is written before the first test, and
"MARK INDEX" for a test that passed.

The program of an answer runs in an interpreter of its own (`program.py`, sent as "runner"), which
has neither the tests nor the mark. Each test runs in a fork of this process, which never executes
code of the answer. A test calls the program through a socket, and receives plain values of exact
types, which are built here. So no object of the answer takes part in a comparison. The memory and
the descriptors of this process are closed to processes of the same user.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4
KILLED_S = 5.0  # Seconds until a killed program has ended.
MODULES = frozenset(getattr(sys, "stdlib_module_names", ())) or None


class ProgramError(Exception):
    """The program raised an error of its own, ended, or returned what no test can compare."""


def close_memory() -> None:
    """Deny other processes this one's memory and descriptors. Raises: OSError: it is refused."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def make_coding(runner: str) -> dict[str, Any]:
    """Return the names of `program.py`, whose coding of values both sides use."""
    names: dict[str, Any] = {"__name__": "coding"}
    exec(compile(runner, "program.py", "exec"), names)
    return names


class ProgramLink:
    """The calls of a test into the program."""

    def __init__(self, connection: socket.socket, coding: dict[str, Any]) -> None:
        self.connection = connection
        self.coding = coding
        self.callbacks: dict[int, Any] = {}

    def encode(self, value: Any) -> Any:
        """Return a value for the program. Functions of the test stay here and are called back."""

        def refer(value: Any) -> Any:
            if type(value) in (Remote, RemoteIterator):
                return {"remote": number_of(value)}
            if callable(value):
                self.callbacks[id(value)] = value
                return {"callback": id(value)}
            raise ProgramError(f"{type(value).__name__} cannot be passed to the program")

        return self.coding["encode"](value, refer)

    def decode(self, value: Any) -> Any:
        """Return a value of the program, made of plain types and references."""

        def resolve(reference: dict[str, Any]) -> Any:
            if "callback" in reference:
                return self.callbacks[reference["callback"]]
            kind = RemoteIterator if reference.get("iterates") else Remote
            return kind(self, int(reference["remote"]))

        return self.coding["decode"](value, resolve)

    def ask(self, op: str, **fields: Any) -> Any:
        """Return the answer of the program. Raises: ProgramError, or the program's own error."""
        self._send({"op": op, **fields})
        while True:
            reply = self._receive()
            if "callback" in reply:
                self._send(self._called_back(reply))
            elif "error" in reply:
                raise error_of(str(reply["error"]), str(reply.get("text", "")))
            else:
                return reply

    def call(self, number: int, arguments: Any, keywords: Any) -> Any:
        """Return the value of a call; changes of its lists, dictionaries and sets are copied."""
        sent = [self.encode(each) for each in arguments]
        named = {name: self.encode(each) for name, each in keywords.items()}
        reply = self.ask("call", number=number, arguments=sent, keywords=named)
        # Python 3.8 has no `strict`.
        for argument, changed in zip(arguments, reply.get("arguments", [])):  # noqa: B905
            if changed is not None:
                refill(argument, self.decode(changed))
        return self.decode(reply["value"])

    def _called_back(self, reply: Any) -> Any:
        try:
            arguments = [self.decode(each) for each in reply["arguments"]]
            return {"value": self.encode(self.callbacks[reply["callback"]](*arguments))}
        except Exception as error:  # noqa: BLE001 - Code of a test may raise anything.
            return {"error": type(error).__name__, "text": str(error)}

    def _send(self, message: Any) -> None:
        try:
            self.coding["send"](self.connection, message)
        except OSError as error:
            raise ProgramError("the program has ended") from error

    def _receive(self) -> Any:
        try:
            reply = self.coding["receive"](self.connection)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise ProgramError("the program has ended") from error
        if type(reply) is not dict:
            raise ProgramError("the program sent no object")
        return reply


class Remote:
    """A function or an object of the program. It is equal to nothing and has no truth value."""

    __slots__ = ("_link", "_number")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, link: ProgramLink, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return link_of(self).call(number_of(self), arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reply = link_of(self).ask("get", number=number_of(self), name=name)
        return link_of(self).decode(reply["value"])

    def __setattr__(self, name: str, value: Any) -> None:
        link = link_of(self)
        link.ask("set", number=number_of(self), name=name, value=link.encode(value))

    def __eq__(self, other: object) -> bool:
        raise ProgramError("an object of the program is compared")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ProgramError("an object of the program has no truth value")


class RemoteIterator:
    """An iterator of the program, whose items are plain values."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: ProgramLink, number: int) -> None:
        self._link = link
        self._number = number

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        reply = self._link.ask("next", number=self._number)
        if reply.get("ends"):
            raise StopIteration
        return self._link.decode(reply["value"])

    def __bool__(self) -> bool:
        raise ProgramError("an object of the program has no truth value")


def link_of(remote: Any) -> ProgramLink:
    return object.__getattribute__(remote, "_link")


def number_of(remote: Any) -> int:
    return object.__getattribute__(remote, "_number")


def error_of(name: str, text: str) -> Exception:
    """Return an error of the program: a built-in one by its name, or a ProgramError."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            return kind(text)
    return ProgramError(f"{name}: {text}")


def refill(value: Any, changed: Any) -> None:
    """Give a list, dictionary or set of the test the content that the program left in it."""
    if type(value) is not type(changed):
        return
    if type(value) is list:
        value[:] = changed
    elif type(value) in (dict, set):
        value.clear()
        value.update(changed)


def names_of(
    link: ProgramLink, reply: Any, taken: dict[str, Any], tested: list[str]
) -> dict[str, Any]:
    """Return the names of the program for a test, without those in `taken`.

    A built-in name counts only if it is one of the tested functions. A module, and what the program
    imports from one under its own name, is imported here.
    """
    names: dict[str, Any] = {}
    for name, entry in reply["names"].items():
        is_taken = hasattr(builtins, name) and name not in tested
        if is_taken or name in taken or name.startswith("__"):
            continue
        module = entry.get("module")
        if module is None:
            names[name] = link.decode(entry["value"])
            continue
        if MODULES is not None and module.split(".")[0] not in MODULES:
            continue
        with contextlib.suppress(ImportError, AttributeError):
            imported = importlib.import_module(module)
            names[name] = imported if entry.get("whole") else getattr(imported, name)
    return names


def import_all(source: str) -> None:
    """Import the modules of a test before the program runs, which could change their files."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def run_test(order: dict[str, Any], test: str) -> bool:
    """Return whether a test passes within the time."""
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-I", "-c", order["runner"], str(theirs.fileno())]
    program = subprocess.Popen(
        argv,
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    reading, writing = os.pipe()
    tester = os.fork()
    if tester == 0:
        perform(order, test, ours, writing)
    os.close(writing)
    ours.close()
    is_ready = bool(select.select([reading], [], [], order["seconds"])[0])
    has_passed = is_ready and os.read(reading, 1) == b"1"
    os.close(reading)
    for pid in (tester, program.pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(tester, 0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(timeout=KILLED_S)
    return has_passed


def perform(order: dict[str, Any], test: str, connection: socket.socket, writing: int) -> NoReturn:
    """Execute a test in this forked process. It never returns."""
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(nothing, target)
        sys.argv = ["test.py"]
        import_all(order["setup"] + "\n" + test)
        link = ProgramLink(connection, make_coding(order["runner"]))
        started = {"source": order["program"], "setup": order["setup"]}
        reply = link.ask("start", **started)
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.suppress(SyntaxError):  # The head of a problem may end inside a function.
            exec(compile(order["head"], "head.py", "exec"), names)
        names.pop(order["entry_point"], None)
        names.update(names_of(link, reply, names, order["tested"]))
        exec(compile(order["setup"] + "\n" + test, "test.py", "exec"), names)
        os.write(writing, b"1")
    finally:
        os._exit(0)


def main() -> None:
    """Run all tests."""
    close_memory()
    with open(sys.argv[1], encoding="utf-8") as file:
        order = json.load(file)
    os.remove(sys.argv[1])
    os.write(1, f"{order['mark']} begins\n".encode())
    for index, test in enumerate(order["tests"]):
        if run_test(order, test):
            os.write(1, f"{order['mark']} {index}\n".encode())


if __name__ == "__main__":
    main()
