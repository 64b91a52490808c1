"""Files and modules of the user: found as a command would find them, and loaded by their path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from common.errors import ConfigError
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
