"""Environments by name: loading and machine requirements."""

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection, own_tasks
from common.repository import CODE, with_program_name
from common.text import known_hint
from common.user_code import load_file
from envhub.env import EnvSpec, Isolation, Style, SubsetSpec
from envhub.errors import UnknownEnv
from envhub.summed_rewards import with_summed_rewards
from envhub.tables import read_table


@cache
def load_extensions(kind: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions that are registered under `kind`, in the order of the table."""
    names: list[str] = read_table(__file__, "extensions.yaml")[kind]
    pairs = (name.split(":") for name in names)
    return tuple(
        getattr(import_module(module), function)
        for module, function in pairs
        if find_spec(module.rpartition(".")[0]) is not None
    )


REMOTE = "envhub.agentgym.remote"
LIBRARIES = {  # Prefixes of references to libraries, with the module that builds the environment.
    "gymnasium": "envhub.interop.games",
    "textarena": "envhub.interop.games",
    "mcp": "envhub.interop.mcp_server",
    "verifiers": "envhub.interop.verifiers_taskset",
}
# Modules for dialects that are not AgentGym's.
REMOTES = {"openenv": "envhub.interop.openenv_remote"}
# Minimum for an outside environment that does not request a worker itself.
OUTSIDE_SESSIONS_PER_WORKER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Requirements of an environment: any one of `binaries` on the PATH, and all of `modules`."""

    what: str
    remedy: str
    binaries: Sequence[str] = ()
    modules: Sequence[str] = ()
    instead: str = ""  # Option with a program's path; if it is set, PATH is not searched.

    def is_met(self, options: EnvsSection) -> bool:
        """Return whether this machine meets the requirement."""
        binary = attrgetter(self.instead)(options) if self.instead else ""
        binaries = [binary] if binary else self.binaries
        has_binary = not binaries or any(map(shutil.which, binaries))
        return has_binary and all(find_spec(name) for name in self.modules)


_TABLE = read_table(__file__, "environments.yaml")
_NEEDS = {name: Requirement(**fields) for name, fields in _TABLE["requirements"].items()}
_FOLDER = Path(__file__).parents[1] / "envs"
LOADERS = {  # An environment is a module, or a folder with the module `env` beside its data.
    name: f"envhub.envs.{name}" + ".env" * (_FOLDER / name).is_dir()
    for name in _TABLE["environments"]
}
REQUIREMENTS = {
    name: tuple(_NEEDS[need] for need in needs) for name, needs in _TABLE["environments"].items()
}


class Registry:
    """The environments that one hub offers.

    A name is one of LOADERS, the dialect of `remote`, or a reference to an environment outside the
    package: "package.module:function", "path/to/file.py:function", or one of LIBRARIES. An outside
    environment is offered under the name in its own specification, and always runs in a worker.
    """

    def __init__(
        self,
        env_names: Sequence[str],
        options: EnvsSection | None = None,
        remote: RemoteOptions | None = None,
    ) -> None:
        """Import outside environments immediately, others at first use.

        Raises: UnknownEnv: no such environment; the text names the nearest name.
        """
        self.options = options or EnvsSection()
        self.remote = remote or RemoteOptions()
        self._specs: dict[str, EnvSpec] = {}
        self._references: dict[str, str] = {}
        for name in filter(is_reference, env_names):
            spec = load_spec(name, self.options, self.remote)
            self._specs[spec.name] = spec
            self._references[spec.name] = name
        inside = [name for name in env_names if not is_reference(name)]
        if self.remote.dialect:
            inside.append(self.remote.dialect)
        names = [*LOADERS, *self._specs, *filter(None, [self.remote.dialect])]
        for name in inside:
            if name not in names:
                raise UnknownEnv(_unknown(name, names))
            self._references.setdefault(name, name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._references))

    def spec(self, name: str) -> EnvSpec:
        """Return an environment's catalogue entry.

        Raises: UnknownEnv: this hub does not offer it.
        """
        spec = self._specs.get(name)
        if spec is None:
            if name not in self._references:
                raise UnknownEnv(_unknown(name, list(self._references)))
            spec = self._specs[name] = load_spec(name, self.options, self.remote)
        return spec

    def loaded(self) -> list[EnvSpec]:
        return list(self._specs.values())

    def load_order(self, name: str) -> dict[str, Any]:
        """Return, as JSON, the arguments with which a worker process loads the same environment."""
        reference = self._references[name]
        if not is_reference(reference):
            reference = f"{LOADERS[name]}:make_spec"
        return {
            "reference": reference,
            "options": {"envs": asdict(self.options), "env": asdict(self.remote)},
        }

    def catalogue(self) -> dict[str, dict[str, Any]]:
        """Return subsets, sizes, turn limits, tasks and instructions of all as JSON."""
        return {name: _entry(self.spec(name)) for name in self.names}


def is_reference(name: str) -> bool:
    """Return whether a name refers to an environment outside the package."""
    return ":" in name


def parse_options(plain: Mapping[str, Any]) -> tuple[EnvsSection, RemoteOptions]:
    """Return the options serialized by `Registry.load_order`."""
    return _like(EnvsSection(), plain["envs"]), RemoteOptions(**plain["env"])


def _like(default: Any, value: Any) -> Any:
    """Return a section of the configuration, and those below it, from JSON; others unchanged."""
    if not is_dataclass(default):
        return value
    fields = {name: _like(getattr(default, name), part) for name, part in value.items()}
    return type(default)(**fields)  # type: ignore[operator]


def load_spec(name: str, options: EnvsSection, remote: RemoteOptions) -> EnvSpec:
    """Import an environment and return its specification, with the style `instructed`.

    Raises: UnknownEnv: the reference names no module, or no function in the module.
    """
    spec = _load_spec(name, options, remote)
    texts = spec.instruction
    instructed = texts.get(Style.INSTRUCTED) or texts.get(Style.COMPACT, "")
    make: Any = spec.make

    def make_worded(style: Style) -> Any:
        """Return an episode. Observations of `instructed` are the compact ones."""
        return make(Style.COMPACT if style is Style.INSTRUCTED else style)

    return replace(spec, make=make_worded, instruction={**texts, Style.INSTRUCTED: instructed})


def _load_spec(name: str, options: EnvsSection, remote: RemoteOptions) -> EnvSpec:
    """Return the specification as its environment made it, with defaults filled in."""
    if (maker := LIBRARIES.get(name.partition(":")[0])) is not None:
        return import_module(maker).make_spec(name)
    if is_reference(name):
        module, _, function = name.rpartition(":")
        make_spec = getattr(_import_outside(module), function, None)
        if not inspect.isroutine(make_spec) or inspect.isbuiltin(make_spec):
            raise UnknownEnv(
                f"environment {name!r}: {module} does not define a function {function!r}"
            )
        spec = _call(make_spec, options)
        if not isinstance(spec, EnvSpec):
            raise UnknownEnv(
                f"environment {name!r}: the function returns {type(spec).__name__}, not EnvSpec"
            )
        ids = (i for task in spec.tasks.values() for i in (task.subset, *task.train, *task.test))
        for word in (spec.name, *spec.subsets, *ids):  # Messages and files contain these names.
            if not word or not word.isprintable():
                raise UnknownEnv(f"environment {name!r}: the name {word!r:.100} is not printable")
        if spec.sessions_per_worker < 0:
            raise UnknownEnv(
                f"environment {name!r}: sessions_per_worker={spec.sessions_per_worker} is below 0"
            )
        is_worker = spec.isolation is Isolation.WORKER
        num_sessions = spec.sessions_per_worker or (1 if is_worker else OUTSIDE_SESSIONS_PER_WORKER)
        spec = replace(spec, isolation=Isolation.WORKER, sessions_per_worker=num_sessions)
        return with_summed_rewards(spec)
    if name == remote.dialect:
        return with_summed_rewards(import_module(REMOTES.get(name, REMOTE)).make_spec(remote))
    spec = _call(import_module(LOADERS[name]).make_spec, options)
    spec = with_summed_rewards(replace(spec, note=own_tasks(name, options)))
    for extend in load_extensions("specs"):
        spec = extend(spec, options)
    return spec


def _call(make_spec: Callable[..., EnvSpec], options: EnvsSection) -> EnvSpec:
    """Call with the options, or without arguments if the function takes none."""
    takes_options = len(inspect.signature(make_spec).parameters) > 0
    return make_spec(options) if takes_options else make_spec()


def _import_outside(module: str) -> ModuleType:
    """Return a module of the user, by its name or its file. Raises: UnknownEnv."""
    if not module.endswith(".py"):
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            raise UnknownEnv(f"environment {module!r}: {error}{_taken(error)}") from error
    path = Path(module)
    if not path.is_file():
        raise UnknownEnv(f"environment {module!r}: no such file (from {Path.cwd()})")
    try:
        return load_file(path, name=f"outside_{path.stem}")
    except ModuleNotFoundError as error:
        if not _taken(error):
            raise
        raise UnknownEnv(f"environment {module!r}: {error}{_taken(error)}") from error


def _taken(error: ModuleNotFoundError) -> str:
    """Return that a missing module has a name of the product; "" if it has another one."""
    name = (error.name or "").partition(".")[0]
    is_taken = bool(name) and any((CODE / each).exists() for each in (name, f"{name}.py"))
    return f"; {name!r} is a name of this project, give your package another one" * is_taken


def _sizes(subset: SubsetSpec) -> dict[str, int]:
    """Return the sizes and the turn limit of a subset, without validation items if it has none."""
    sizes = asdict(subset)
    if not subset.num_validation:
        del sizes["num_validation"]
    return sizes


def _entry(spec: EnvSpec) -> dict[str, Any]:
    """Return the catalogue entry of an environment as JSON."""
    tasks = {
        name: {
            "scenario": task.scenario,
            "subset": task.subset,
            "num_train": len(task.train),
            "num_test": len(task.test),
            **({"note": task.note} if task.note else {}),
        }
        for name, task in spec.tasks.items()
    }
    return {
        "subsets": {name: _sizes(subset) for name, subset in spec.subsets.items()},
        "tasks": tasks,
        **({"note": spec.note} if spec.note else {}),
        **({"content": dict(spec.content)} if spec.content else {}),
        **({"paper": asdict(spec.paper)} if spec.paper else {}),
        **({"tools": list(spec.tools)} if spec.tools else {}),
        **({"seats": spec.seats} if spec.seats > 1 else {}),
        "instruction": {style.value: text for style, text in spec.instruction.items()},
        "acknowledgement": {style.value: text for style, text in spec.acknowledgement.items()},
        "is_quick": spec.isolation is Isolation.INLINE,  # Fast steps are worth batching.
    }


def _unknown(name: str, names: Sequence[str]) -> str:
    """Return the text about an unknown environment, with the nearest name."""
    if not names:
        return f"no environment {name!r}; this hub has no environments"
    return f"no environment {name!r}{known_hint(name, names)}"


def missing_requirements(
    env_names: Sequence[str],
    options: EnvsSection | None = None,
    remote: RemoteOptions | None = None,
) -> list[str]:
    """Return one line for each requirement of an environment that the machine does not meet.

    Names that are not in LOADERS have no requirements in the registry.
    """
    options = options or EnvsSection()
    lines: list[str] = []
    for name in env_names:
        if remote is not None and name == remote.dialect:
            continue
        unmet = [each for each in REQUIREMENTS.get(name, ()) if not each.is_met(options)]
        lines += [f"{name} needs {each.what}: {each.remedy}" for each in unmet]
        if not unmet and name in LOADERS:
            lines += [f"{name}: {line}" for line in _check(LOADERS[name], options)]
    return [with_program_name(line) for line in lines]


def _check(module: str, options: EnvsSection) -> list[str]:
    """Return the missing requirements reported by the environment's own `check`."""
    try:
        check = getattr(import_module(module), "check", None)
    except ImportError as error:
        return [f"cannot be imported: {error}"]
    return [line for line in check(options) if line] if check is not None else []
