"""Files and modules of the user: found as a command would find them, and loaded by their path."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import ConfigError
from common.functions.process import place_of
from common.repository import ROOT, working_directory


def find_path(key: str, name: str) -> Path:
    """Return a path of the configuration, below the command's directory or else the repository.

    Raises: ConfigError: neither has it.
    """
    folder = working_directory()
    for path in (folder / Path(name).expanduser(), ROOT / name):
        if path.exists():
            return path
    raise ConfigError(f"{key}={name}: no such file or folder (from {folder})")


def load_file(path: Path, *, name: str) -> ModuleType:
    """Execute a file of Python and return its module, which gets this name in `sys.modules`.

    Raises: FileNotFoundError: there is no such file. Any error of the file itself.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses search for their module in `sys.modules`.
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFunction:
    """A function of the user that a key of the configuration names."""

    key: str  # Such as algorithm.policy_loss.
    reference: str  # Value of the key: module:function or file.py:function.
    function: Callable[..., Any]
    sha256: str  # Digest of the file that defines it.

    @property
    def where(self) -> str:
        """The key and its value, for messages."""
        return f"{self.key}={self.reference}"

    @property
    def short(self) -> str:
        """The reference without folders, for formulas."""
        return self.reference.rpartition("/")[2]

    @property
    def summary(self) -> str:
        """The first line of its documentation, "" without one."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def note(self) -> str:
        """The function with the first line of its documentation and the digest of its file."""
        return f"{self.where}: {self.summary or 'your function'} (sha256 {self.sha256[:12]})"

    def check_arguments(self, *names: str) -> None:
        """Check that it can be called with these arguments by position. Raises: ConfigError."""
        try:
            inspect.signature(self.function).bind(*names)
        except TypeError as error:
            raise ConfigError(
                f"{self.where}: {error}; it is called with ({', '.join(names)})"
            ) from error
        except ValueError:  # A function in C may have no signature.
            return

    def call(self, *arguments: Any) -> Any:
        """Return the value of a call. Raises: ConfigError: it raised an error; names the line."""
        try:
            return self.function(*arguments)
        except Exception as error:
            place = place_of(error, caller=__file__)
            raise ConfigError(f"{self.where}: {type(error).__name__}: {error}{place}") from error

    def check_equal(self, first: Any, second: Any) -> None:
        """Check the values of two calls with equal arguments. Raises: ConfigError: they differ."""
        if first != second:
            raise ConfigError(
                f"{self.where}: two calls with equal arguments returned {first!r:.100} and"
                f" {second!r:.100}; it must depend on its arguments alone, without a global"
                " variable, a clock or random numbers, and must not change them"
            )


def digests_of(functions: Iterable[ImportedFunction]) -> dict[str, str]:
    """Return the digests of the functions' files, by the key and the value that name them."""
    return {user.where: user.sha256 for user in functions}


def changed_functions(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a sentence for each function of the user whose file has changed since a start."""
    return [
        f"{where}: its file has changed: sha256 was {was[where][:12]}, is {digest[:12]}"
        for where, digest in now.items()
        if was.get(where, digest) != digest
    ]


@cache
def load_function(key: str, reference: str) -> ImportedFunction:
    """Return the function of `module:function` or `file.py:function`.

    Raises: ConfigError: the module or the function is missing, or the module fails.
    """
    name, _, attribute = reference.rpartition(":")
    where = f"{key}={reference}"
    try:
        module = _load_module(key, name)
    except ConfigError:
        raise
    except Exception as error:
        place = place_of(error, caller=__file__)
        raise ConfigError(
            f"{where}: {name} cannot be loaded: {type(error).__name__}: {error}{place}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [k for k, v in vars(module).items() if inspect.isfunction(v) and k[0] != "_"]
        listed = f"; it has {', '.join(names[:10])}" if names else ""
        raise ConfigError(f"{where}: {name} has no function {attribute!r}{listed}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: it is asynchronous; write `def` in place of `async def`")
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where}: it is a generator; write `return` in place of `yield`")
    source = Path(module.__file__ or "")
    content = source.read_bytes() if source.is_file() else b""
    return ImportedFunction(
        key=key, reference=reference, function=function, sha256=hashlib.sha256(content).hexdigest()
    )


def _load_module(key: str, name: str) -> ModuleType:
    """Return a module by its file or by its name."""
    folders = [working_directory()]
    path = None
    if name.endswith(".py"):
        path = find_path(key, name).resolve()
        folders.insert(0, path.parent)
    # At the end: a module of the user does not replace one of the product.
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
    if path is None:
        return import_module(name)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return load_file(path, name=f"user_{path.stem}_{digest}")
