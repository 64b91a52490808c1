"""Python values as overrides. Functions and classes travel as import paths of their files."""

import inspect
import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from common.config.envs import EnvsSection
from common.errors import ConfigError
from envhub.env import EnvSpec

Overrides = Mapping[str, Any] | Sequence[str]
NOTHING: Overrides = ()
REMEDY = (
    "write it to a file, such as my_code.py (`%%writefile my_code.py` in a notebook), import it"
)
MAKE_SPEC = "make_spec"
TASKS = "tasks"
SERVED = "envhub.envs"


def overrides_of(overrides: Overrides) -> list[str]:
    """Return overrides as words of the command line.

    A map has values of Python. A function becomes `file.py:function`, or `module:function` if it
    belongs to a package. An environment's class becomes its `make_spec`.

    Raises: ConfigError: a value has no form in the configuration, or no role could import it.
    """
    if isinstance(overrides, Mapping):
        values = _with_environments(dict(cast(Mapping[str, Any], overrides)))
        return [f"{key}={_text(_plain(key, value))}" for key, value in values.items()]
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    for word in words:
        if "=" not in word or word.startswith("-"):
            raise ConfigError(f"{word}: an override is key=value, like learner.lr=1e-4")
    return words


def _text(value: Any) -> str:
    """Return a plain value as the command line expects it: a text as it is, others as YAML."""
    is_bare = isinstance(value, str) and value[:1] not in ("'", '"')
    return value if is_bare else json.dumps(value, ensure_ascii=False)


def _plain(key: str, value: Any) -> Any:
    """Return a value with import paths in place of functions and classes."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        return {str(name): _plain(f"{key}.{name}", each) for name, each in entries.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{key}[{i}]", each) for i, each in enumerate(cast(list[Any], value))]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # A number of numpy or torch.
        return value.item()
    if callable(value):
        return reference_of(key, _maker_of(key, value) if inspect.isclass(value) else value)
    raise ConfigError(
        f"{key}: {type(value).__name__} has no form in the configuration; give a number, a text, a"
        " list, a map, a function or an environment's class"
    )


def reference_of(key: str, function: Any) -> str:
    """Return the import path with which another process finds a function or another object.

    Raises: ConfigError: the object belongs to no file, or no module has it at its top level.
    """
    name = getattr(function, "__qualname__", "")
    module_name = getattr(function, "__module__", None) or ""
    shown = f"{key}={name or type(function).__name__}"
    if module_name == "__main__":
        last = name.rpartition(".")[2]
        raise ConfigError(
            f"{shown}: a role cannot import it from __main__, the script or notebook that runs;"
            f" {REMEDY}, and give my_code.{'NAME' if '<' in last else last}"
        )
    place = _place_of(function)
    if place is None:
        raise ConfigError(
            f"{shown}: no imported file has this object at its top level. A lambda, a nested"
            " function, a method and a partial need a name there; after a reload of a module, take"
            f" the function from the module again; otherwise {REMEDY}"
        )
    module, name = place
    path = Path(str(module.__file__)).resolve()
    libraries = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    if "." in module.__name__ or any(path.is_relative_to(each) for each in libraries):
        return f"{module.__name__}:{name}"
    return f"{path}:{name}"


def _place_of(function: Any) -> tuple[ModuleType, str] | None:
    """Return an imported module of a file that has an object at its top level, and its name there.

    The module that defines a function comes first. A partial or an object of a library's class may
    have a name in a module of the user.
    """
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    others = [module for name, module in sys.modules.items() if name != "__main__"]
    for module in (home, *others):
        if isinstance(module, ModuleType) and getattr(module, "__file__", None):
            name = getattr(function, "__name__", "")
            for each in (name, *vars(module)):
                if vars(module).get(each) is function and each.isidentifier():
                    return module, each
    return None


def import_roots(overrides: Overrides) -> list[str]:
    """Return the folders in which this process finds the user's packages, for a child process."""
    if not isinstance(overrides, Mapping):
        return []
    folders = [Path(folder or ".").resolve() for folder in sys.path]
    pythons = (Path(sys.prefix).resolve(), Path(sys.base_prefix, "lib").resolve())
    return [str(each) for each in folders if not any(map(each.is_relative_to, pythons))]


def _with_environments(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return overrides in which tasks name environments, and the hub serves those given as objects.

    Raises: ConfigError: the hub's environments are set as well.
    """
    tasks = overrides.get(TASKS)
    is_list = isinstance(tasks, (list, tuple))
    entries = (
        [each for each in cast(list[Any], tasks) if isinstance(each, Mapping)] if is_list else []
    )
    makers = {
        i: _maker_of(f"{TASKS}[{i}].env", env) if inspect.isclass(env) else env
        for i, task in enumerate(entries)
        if callable(env := cast(Mapping[str, Any], task).get("env"))
    }
    if not makers:
        return overrides
    if SERVED in overrides:
        raise ConfigError(
            f"{SERVED}: the tasks have environments as objects, which the hub serves by itself;"
            f" leave {SERVED} out, or name all environments there"
        )
    references = {i: reference_of(f"{TASKS}[{i}].env", maker) for i, maker in makers.items()}
    named = [
        {**task, "env": _spec_of(f"{TASKS}[{i}].env", makers[i]).name} if i in makers else task
        for i, task in enumerate(entries)
    ]
    inside = [task["env"] for i, task in enumerate(named) if i not in makers]
    served = [*references.values(), *inside]
    return {**overrides, TASKS: named, SERVED: list(dict.fromkeys(served))}


def _maker_of(key: str, kind: type) -> Any:
    """Return `make_spec` of the module of an environment's class, or another class unchanged.

    Raises: ConfigError: the module's `make_spec` makes another environment.
    """
    is_environment = hasattr(kind, "reset") and hasattr(kind, "step")
    if not is_environment or kind.__module__ == "__main__":  # The usual refusal names the class.
        return kind
    make_spec = getattr(sys.modules.get(kind.__module__), MAKE_SPEC, None)
    if not callable(make_spec):
        raise ConfigError(
            f"{key}={kind.__name__}: {kind.__module__} has no function {MAKE_SPEC}(), which names"
            " the environment's items and limits; docs/ADD_AN_ENVIRONMENT.md has an example"
        )
    if _spec_of(key, make_spec).make is not kind:
        raise ConfigError(
            f"{key}={kind.__name__}: {MAKE_SPEC}() of {kind.__module__} returns an EnvSpec with"
            f" another `make`; give the function that returns make={kind.__name__}"
        )
    return make_spec


def _spec_of(key: str, make_spec: Any) -> EnvSpec:
    """Return an environment's specification. Raises: ConfigError: the function returns none."""
    takes_options = len(inspect.signature(make_spec).parameters) > 0
    spec = make_spec(EnvsSection()) if takes_options else make_spec()
    if not isinstance(spec, EnvSpec):
        raise ConfigError(
            f"{key}={make_spec.__qualname__}: returned {type(spec).__name__}; expected an EnvSpec"
        )
    return spec
