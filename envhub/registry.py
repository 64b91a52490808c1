"""Environments by name: how to load each, and what it needs from the machine."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from envhub.env import EnvSpec, nearest

LOADERS = {
    "babyai": "envhub.envs.babyai.env",
    "textcraft": "envhub.envs.textcraft.env",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A program that an environment needs; any one of `binaries` on the PATH will do."""

    what: str
    binaries: tuple[str, ...]
    remedy: str


# Programs that pip cannot install. Environments that are pure Python have no entry.
REQUIREMENTS: dict[str, tuple[Requirement, ...]] = {}


class UnknownEnv(KeyError):
    """No environment of that name is offered; the text names the nearest one."""

    def __str__(self) -> str:
        return self.args[0]


class Registry:
    """The environments one hub offers; a module is imported when its entry is first asked for."""

    def __init__(self, env_names: Sequence[str]) -> None:
        for name in env_names:
            if name not in LOADERS:
                raise UnknownEnv(_unknown(name, list(LOADERS)))
        self._names = tuple(env_names)
        self._specs: dict[str, EnvSpec] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order they were asked for."""
        return self._names

    def spec(self, name: str) -> EnvSpec:
        """Returns an environment's catalogue entry.

        Raises:
            UnknownEnv: this hub does not offer it.
        """
        spec = self._specs.get(name)
        if spec is None:
            if name not in self._names:
                raise UnknownEnv(_unknown(name, list(self._names)))
            loader: Callable[[], EnvSpec] = import_module(LOADERS[name]).make_spec
            spec = self._specs[name] = loader()
        return spec

    def catalogue(self) -> dict[str, dict]:
        """Returns subsets, sizes, turn limits and instructions of every environment, as JSON."""
        return {name: _entry(self.spec(name)) for name in self._names}


def _entry(spec: EnvSpec) -> dict:
    subsets = {
        name: {"num_train": s.num_train, "num_test": s.num_test, "max_turns": s.max_turns}
        for name, s in spec.subsets.items()
    }
    instruction = {style.value: text for style, text in spec.instruction.items()}
    return {"subsets": subsets, "instruction": instruction}


def _unknown(name: str, known: list[str]) -> str:
    if not known:
        return f"no environment {name!r}; this hub offers none"
    return f"no environment {name!r}; the nearest is {nearest(name, known)!r}"


def missing_requirements(env_names: Sequence[str]) -> list[str]:
    """Returns a line for each program that an environment needs and the machine lacks."""
    return [
        f"{name} needs {requirement.what}: {requirement.remedy}"
        for name in env_names
        for requirement in REQUIREMENTS.get(name, ())
        if not any(shutil.which(binary) for binary in requirement.binaries)
    ]
