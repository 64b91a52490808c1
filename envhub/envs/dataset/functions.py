"""Loads functions of the user, and calls them with a time limit."""

import asyncio
import ctypes
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import ConfigError
from common.repository import working_directory
from envhub.env import EnvFailure
from envhub.envs.dataset.files import find_path

NUM_THREADS = 32
INTERRUPT_S = 0.5  # Seconds in which an interrupted call should end.
_files: dict[Path, ModuleType] = {}  # Modules that were loaded from files.


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function of the user with the keywords that it takes."""

    reference: str  # Value of the key: module:function or file.py:function.
    function: Callable[..., Any]
    keywords: frozenset[str]  # The keywords that the signature names.
    takes_all: bool  # The signature has `**kwargs`.
    is_async: bool

    def chosen(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Return the offered keywords that the function takes."""
        if self.takes_all:
            return dict(offered)
        return {name: value for name, value in offered.items() if name in self.keywords}


def load_function(key: str, reference: str) -> UserFunction:
    """Return the function of `module:function` or `file.py:function`.

    Raises: ConfigError: the module or the function is missing, or the module fails.
    """
    module_name, colon, name = reference.rpartition(":")
    where = f"{key}={reference}"
    if not colon or not module_name or not name:
        raise ConfigError(f"{where}: expects module:function or file.py:function")
    module = _load_module(key, where, module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [k for k, v in vars(module).items() if inspect.isroutine(v) and k[0] != "_"]
            listed = f"; it has {', '.join(known[:10])}" if known else ""
            raise ConfigError(f"{where}: {module_name} has no function {name!r}{listed}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where}: {name} is {type(found).__name__}, not a function")
    return as_function(where, reference, found)


def as_function(where: str, reference: str, found: Callable[..., Any]) -> UserFunction:
    """Return a function with its keywords. Raises: ConfigError: it takes none by name."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: the function has no readable signature: {error}") from error
    kinds = inspect.Parameter
    bare = [p.name for p in parameters if p.kind is kinds.POSITIONAL_ONLY and p.default is p.empty]
    if bare:
        raise ConfigError(f"{where}: the parameter {bare[0]!r} is positional only; name keywords")
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    call = getattr(found, "__call__", found)  # noqa: B004
    return UserFunction(
        reference=reference,
        function=found,
        keywords=frozenset(p.name for p in parameters if p.kind in by_name),
        takes_all=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(call),
    )


def needed_keywords(user: UserFunction) -> list[str]:
    """Return the keywords without a default."""
    parameters = inspect.signature(user.function).parameters.values()
    return [p.name for p in parameters if p.name in user.keywords and p.default is p.empty]


def check_keywords(where: str, user: UserFunction, offered: Mapping[str, Any]) -> None:
    """Raise ConfigError if the function needs a keyword that is not offered."""
    for name in needed_keywords(user):
        if name not in offered:
            raise ConfigError(
                f"{where}: the function needs {name!r}, which is not offered; the keywords are"
                f" {', '.join(offered)}"
            )


def _load_module(key: str, where: str, name: str) -> ModuleType:
    """Return a module by its name or its file. Raises: ConfigError: it is missing or fails."""
    folder = str(working_directory())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # The file may be new.
    load: Callable[[], ModuleType] = partial(import_module, name)
    if name.endswith(".py"):
        load = partial(_load_file, find_path(key, name).resolve())
    elif not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{where}: {name!r} is no module; a file ends with .py")
    # A future holds any error of the user's code.
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        error = loading.exception()
    if (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "").split(".")[0] == name.split(".")[0]
    ):
        raise ConfigError(f"{where}: no module {name!r} (from {folder})") from error
    if error is not None:
        raise ConfigError(f"{where}: {name} fails: {type(error).__name__}: {error}") from error
    return loading.result()


def _load_file(path: Path) -> ModuleType:
    """Return the module of a file; a file is executed once."""
    if path in _files:
        return _files[path]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # The file may import its neighbours.
    name = f"dataset_user_{path.stem}_{len(_files)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # The name ends with .py.
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses search for their module in `sys.modules`.
    spec.loader.exec_module(module)
    _files[path] = module
    return module


class Caller:
    """Calls functions in the event loop or in threads, each with a time limit."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="reward")

    async def call(
        self, user: UserFunction, offered: Mapping[str, Any], *, timeout_s: float
    ) -> Any:
        """Return the value of a call.

        Raises: EnvFailure: the function raised an error, or did not return in time.
        """
        work = partial(user.function, **user.chosen(offered))
        if not user.is_async:
            value = _value_of(await self._in_thread(work, timeout_s))
            if not inspect.isawaitable(value):
                return value
            work = partial(_awaited, value)
        running: asyncio.Future[Any] = asyncio.ensure_future(work())
        await asyncio.wait([running], timeout=timeout_s)
        if not running.done():
            running.cancel()
            raise EnvFailure(f"no answer within {timeout_s:g} s, its time limit")
        return _value_of(running)

    async def _in_thread(self, work: Callable[[], Any], timeout_s: float) -> asyncio.Future[Any]:
        """Return the finished call of a thread. Raises: EnvFailure: it did not return in time."""
        call = _ThreadCall(work)
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        await asyncio.wait([running], timeout=timeout_s)
        if running.done():
            return running
        call.interrupt()
        await asyncio.wait([running], timeout=INTERRUPT_S)
        if running.done():
            running.exception()  # The error is known, so asyncio does not log it.
        else:
            # The thread hangs outside of Python code. Later calls get other threads.
            self._threads.shutdown(wait=False)
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="reward")
        raise EnvFailure(f"no answer within {timeout_s:g} s, its time limit")

    def close(self) -> None:
        """Release the idle threads."""
        self._threads.shutdown(wait=False)


class _ThreadCall:
    """A call in a thread, which `interrupt` ends with a TimeoutError if it runs Python code."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread = 0  # 0: the call does not run.

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
            if self._thread:
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(self._thread), ctypes.py_object(TimeoutError))


async def _awaited(value: Any) -> Any:
    return await value


def _value_of(finished: asyncio.Future[Any]) -> Any:
    """Return the value of a finished call. Raises: EnvFailure: it raised an error."""
    if finished.cancelled():
        raise EnvFailure("the call was cancelled")
    error = finished.exception()
    if error is not None:
        raise EnvFailure(f"{type(error).__name__}: {error}") from error
    return finished.result()
