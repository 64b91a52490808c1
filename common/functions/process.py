"""Runs functions of the user in a process of its own, which `calls.py` can end at any time.

It is started by its path and imports no module of the product. So packages of the user may have
the names of the product's packages. It reads and answers JSON objects on the socket whose
descriptor is its first argument.
"""

# Values of functions of the user have any type:
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnnecessaryIsInstance=false

import asyncio
import base64
import contextlib
import ctypes
import dataclasses
import datetime
import decimal
import importlib
import importlib.util
import inspect
import json
import math
import os
import socket
import struct
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin

# Top-level names of the product and its former ones.
PRODUCT = (
    "actor",
    "benchmarks",
    "common",
    "envhub",
    "learner",
    "run",
    "tests",
    "scheduler",
    "tools",
)
MAX_TRACE_CHARS = 4000
NUM_THREADS = 64
KIND = "__kind__"  # Name of the type of a value that JSON lacks.
TIMES = (datetime.datetime, datetime.date, datetime.time)
SEQUENCES = (list, tuple, set, frozenset)
PLAIN = (bool, float, str, type(None))


def pack(value: Any) -> Any:
    """Return a value in types of JSON. `unpack` restores it. Raises: TypeError: it cannot."""
    kind: str
    if isinstance(value, float) and not math.isfinite(value):
        return {KIND: "float", "value": repr(float(value))}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else {KIND: "int", "value": hex(value)}
    if type(value) is list:
        return [pack(item) for item in value]
    if type(value) is dict and KIND not in value and all(type(key) is str for key in value):
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        pairs = [[pack(key), pack(item)] for key, item in value.items()]
        return {KIND: "dict", "value": pairs}
    if isinstance(value, SEQUENCES):
        kind = next(base.__name__ for base in SEQUENCES if isinstance(value, base))
        return {KIND: kind, "value": [pack(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, TIMES):
        return {KIND: type(value).__name__, "value": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        parts = [value.days, value.seconds, value.microseconds]
        return {KIND: "timedelta", "value": parts}
    if isinstance(value, decimal.Decimal):
        return {KIND: "Decimal", "value": str(value)}
    if hasattr(value, "tolist"):
        return pack(value.tolist())  # A number or an array of numpy or torch.
    if hasattr(value, "model_dump"):
        return pack(value.model_dump())  # A model of pydantic.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return pack(dataclasses.asdict(value))
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


class Unsent:
    """A value that could not leave the process of its function; it shows its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


KINDS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": base64.b64decode,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "Decimal": decimal.Decimal,
    "unsent": Unsent,
}


def unpack(value: Any) -> Any:
    """Return the value that `pack` has changed."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND in value:
        return KINDS[value[KIND]](unpack(value["value"]))
    return {key: unpack(item) for key, item in value.items()}


def send_frame(connection: socket.socket, message: Any) -> None:
    """Send a message in types of JSON."""
    body = json.dumps(message).encode()
    connection.sendall(struct.pack(">Q", len(body)) + body)


def receive_frame(connection: socket.socket) -> Any:
    """Return the next message. Raises: EOFError: the other side has closed."""
    (length,) = struct.unpack(">Q", _receive(connection, 8))
    return json.loads(_receive(connection, length))


def _receive(connection: socket.socket, length: int) -> bytes:
    """Return this many bytes. Raises: EOFError: the other side has closed."""
    parts: list[bytes] = []
    while length > 0:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class RunningCall:
    """A call in a thread, which `interrupt` ends with a TimeoutError if it runs Python code."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread = 0  # 0: the call does not run.
        self.task: Future[Any] | None = None  # An awaitable of the call in the event loop.

    def __call__(self) -> Any:
        with self._lock:
            self._thread = threading.get_ident()
        try:
            return self._work()
        finally:
            with self._lock:  # A later call of this thread must not be interrupted.
                self._thread = 0

    def interrupt(self) -> None:
        """Raise a TimeoutError in the thread, at its next Python instruction."""
        with self._lock:
            if self.task is not None:
                self.task.cancel()
            elif self._thread:
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(self._thread), ctypes.py_object(TimeoutError))


class Grader:
    """The functions of this process, and their running calls."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._calls: dict[int, RunningCall] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="reward")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def serve(self) -> None:
        """Answer messages until the other side closes."""
        while True:
            message = receive_frame(self._connection)
            number = message["id"]
            if message["op"] == "load":
                self._send(self._load(message))
            elif message["op"] == "ping":  # A blocked event loop does not answer.
                self._loop.call_soon_threadsafe(self._send, {"id": number, "value": None})
            elif message["op"] == "interrupt":
                if call := self._calls.get(message["call"]):
                    call.interrupt()
            else:
                call = self._calls[number] = RunningCall(lambda m=message: self._perform(m))
                self._threads.submit(self._answer, number, call)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            send_frame(self._connection, message)

    def _answer(self, number: int, call: RunningCall) -> None:
        """Perform a call and send its result or its error."""
        try:
            reply = call()
        except BaseException as error:  # noqa: BLE001 - Code of the user may raise anything.
            trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:]
            place = place_of(error, caller=__file__)
            reply = {
                "error": f"{type(error).__name__}: {error}{place}",
                "trace": trace,
                "is_import": isinstance(error, ImportError),
            }
        self._calls.pop(number, None)
        self._send({"id": number, **reply})

    def _load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Load a function; return its signature or the error."""
        reply: dict[str, Any] = {"id": message["id"]}
        try:
            if message["library"]:
                importlib.import_module(message["library"])
            function = _find(message)
            self._functions[message["reference"]] = function
            return {**reply, **signature_of(function)}
        except FunctionRefused as error:
            return {**reply, "refused": str(error)}
        except BaseException as error:  # noqa: BLE001 - Code of the user may raise anything.
            name = message["module"]
            if isinstance(error, ModuleNotFoundError) and _is_part(error.name, name):
                return {**reply, "missing": error.name}
            place = place_of(error, caller=__file__)
            return {**reply, "refused": f"{name} fails: {type(error).__name__}: {error}{place}"}

    def _perform(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the packed value of a call, its logged metrics, and its changes of the state."""
        keywords = unpack(message["keywords"])
        function = self._functions[message["function"]]
        logged: dict[str, float] = {}
        if message["takes_logs"]:
            taken = signature_of(function)
            logs: dict[str, Callable[..., None]] = {
                "log_metric": lambda name, value: logged.update({str(name): float(value)}),
                "log_extra": lambda column, values: None,
            }
            names = logs if taken["takes_all"] else logs.keys() & {*taken["keywords"]}
            keywords |= {name: logs[name] for name in names}
        before: dict[str, Any] = message["state"] or {}
        state = None if message["state"] is None else unpack(before)
        if state is not None:
            keywords["state"] = state
        value = function(**keywords)
        if inspect.isawaitable(value):
            call = self._calls[message["id"]]
            call.task = asyncio.run_coroutine_threadsafe(_awaited(value), self._loop)
            value = call.task.result()
        reply: dict[str, Any] = {"value": _shown(value), "logged": logged}
        if state is not None:
            after = {str(name): _of_state(str(name), item) for name, item in state.items()}
            changed = {k: v for k, v in after.items() if k not in before or before[k] != v}
            reply |= {"changed": changed, "removed": sorted(before.keys() - after.keys())}
        return reply


def place_of(error: BaseException, *, caller: str) -> str:
    """Return " (FILE, line N)": the innermost line of an error, outside of libraries if it can.

    It is "" for an error of the call itself, such as a missing argument.

    Args:
        caller: file of the calling module, whose lines are left out.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (caller, importlib.__file__)
        and not frame.filename.startswith("<frozen")
    ]
    libraries = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    of_user = [frame for frame in frames if not frame.filename.startswith(libraries)]
    last = (of_user or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)


class FunctionRefused(Exception):
    """A function cannot be loaded, or cannot be called by keywords."""


def _is_part(missing: str | None, module: str) -> bool:
    """Return whether the missing module is the wanted one or a package above it."""
    return bool(missing) and f"{module}.".startswith(f"{missing}.")


def _shown(value: Any) -> Any:
    """Return a packed value; one of another type is shown as its text."""
    try:
        return pack(value)
    except (TypeError, ValueError, RecursionError):
        return {KIND: "unsent", "value": f"{value!r:.200}"}


def _of_state(name: str, value: Any) -> Any:
    """Return a packed value of the state. Raises: TypeError: it cannot leave the process."""
    try:
        return pack(value)
    except (TypeError, ValueError) as error:
        kinds = "numbers, texts, lists, dictionaries, sets, times and bytes"
        raise TypeError(f"state[{name!r}]: {error}; a state holds {kinds}") from error


async def _awaited(value: Any) -> Any:
    return await value


def _find(message: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of a message. Raises: FunctionRefused: there is none."""
    module = _load_file(message["file"]) if message["file"] else _load_module(message["module"])
    target: Any = module
    name = message["name"]
    for part in name.split("."):
        if not hasattr(target, part):
            names = [k for k, v in vars(module).items() if inspect.isroutine(v) and k[0] != "_"]
            listed = f"; it has {', '.join(names[:10])}" if names else ""
            raise FunctionRefused(f"{message['module']} has no function {name!r}{listed}")
        target = getattr(target, part)
    if not callable(target):
        raise FunctionRefused(f"{name} is {type(target).__name__}, not a function")
    return target


def _load_module(name: str) -> ModuleType:
    return importlib.import_module(name)


def package_root(path: Path) -> Path:
    """Return the folder of a file, or the one that holds its outermost package."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def _load_file(file: str) -> ModuleType:
    """Return the module of a file; a file is executed once.

    A file of a package, which has an `__init__.py`, may use relative imports.
    """
    path = Path(file)
    package = ".".join(path.parent.relative_to(package_root(path)).parts)
    name = f"{package}.".lstrip(".") + f"dataset_user_{path.stem}_{len(file)}_{sum(file.encode())}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # The name ends with .py.
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses search for their module in `sys.modules`.
    spec.loader.exec_module(module)
    return module


def signature_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a function. Raises: FunctionRefused: it takes none by name."""
    try:
        parameters = _parameters(function)
    except (TypeError, ValueError) as error:
        raise FunctionRefused(f"the function has no readable signature: {error}") from error
    kinds = inspect.Parameter
    bare = [p.name for p in parameters if p.kind is kinds.POSITIONAL_ONLY and p.default is p.empty]
    if bare:
        raise FunctionRefused(f"the parameter {bare[0]!r} is positional only; name keywords")
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    return {
        "keywords": [p.name for p in named],
        "needed": [p.name for p in named if p.default is p.empty],
        "lists": [p.name for p in named if _is_list(p.annotation)],
        "takes_all": any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        "is_async": is_async(function),
    }


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function.

    `from __future__ import annotations` turns annotations into texts. They are evaluated, except if
    a name is imported for type checkers only.

    Raises: TypeError, ValueError: the function has no readable signature.
    """
    signature = inspect.signature(function)
    with contextlib.suppress(NameError, AttributeError, SyntaxError, TypeError):
        signature = inspect.signature(function, eval_str=True)
    return [*signature.parameters.values()]


def _is_list(annotation: Any) -> bool:
    """Return whether the annotation of a parameter is that of a list, or a union with one."""
    if isinstance(annotation, str):  # It could not be evaluated: see `_parameters`.
        return annotation.partition("[")[0] in ("list", "List")
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return any(map(_is_list, get_args(annotation)))
    return annotation is list or get_origin(annotation) is list


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or the `__call__` of an object, is a coroutine function."""
    call = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class UserFirst:
    """Finds modules with a name of the product in the user's folders first.

    Otherwise a folder of the user without `__init__.py` would yield to a package of the product.
    """

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where a top-level module of the user is; None: search elsewhere."""
        del path, target
        return PathFinder.find_spec(name, self._folders) if name in PRODUCT else None


def order_path(folders: list[str], product: str) -> None:
    """Search the user's folders before the installed packages, and the product's folder last."""
    here = str(Path(__file__).resolve().parent)
    product_names = {product, here, str(Path(product).resolve())}
    others = [entry for entry in sys.path if str(Path(entry or ".").resolve()) not in product_names]
    is_package = [Path(entry).name in ("site-packages", "dist-packages") for entry in others]
    place = is_package.index(True) if True in is_package else len(others)
    added = [folder for folder in folders if folder not in others]
    sys.path[:] = [*others[:place], *added, *others[place:], product]
    sys.meta_path.insert(0, UserFirst(folders))


def main() -> None:
    """Serve on the socket whose descriptor is argument 1; the product and user folders follow."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    product, *folders = sys.argv[2:]
    order_path(folders, product)
    sys.argv = sys.argv[:1]
    try:
        Grader(connection).serve()
    except (EOFError, OSError):
        os._exit(0)  # The other side has ended. A thread may still run.


if __name__ == "__main__":
    main()
