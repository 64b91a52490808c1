"""An engine that a run starts beside its actors, with its GPUs and its memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.errors import ConfigError
from common.host.machine import GIB, Gpu
from learner.policy.model_shape import BYTES_OF, read_shape
from tools.checks.memory_parts import Part

Number = TypeVar("Number", int, float)
PROCESS_BYTES = 2 * GIB  # torch and vLLM in the two processes of an engine on a CPU.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine that serves one model to other roles of the run."""

    role: str  # Such as "teacher", "judge-style" or "opponent-0".
    folder: Path  # Folder of the model, with its config.json.
    settings: tuple[str, ...]  # Overrides; later ones replace earlier ones.
    section: str  # Section of its keys `serve` and `gpus`.
    key_variable: str  # Environment variable with the key of its endpoint.
    gpus: tuple[int, ...] = ()  # Numbers of GPUs of this machine; () on a machine without.

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings with the model first."""
        return (f"model.path={self.folder}", *self.settings)

    def parts(self, gpu: Gpu | None) -> list[Part]:
        """Return its memory on a host, or on each of its GPUs.

        Args:
            gpu: None for an engine without a GPU.

        Raises: ConfigError: a setting that the plan reads is no number.
        """
        shape = read_shape(self.folder)
        settings = _values(self.settings)
        width = BYTES_OF.get(settings.get("model.dtype", ""), 2)
        num_gpus = max(1, len(self.gpus))
        weights = shape.num_params * width // num_gpus
        shared = f" / {num_gpus} GPUs" if num_gpus > 1 else ""
        how = f"{shape.num_params / 1e6:,.1f}M x {width} B{shared}"
        parts = [Part(f"{self.role} weights", weights, how)]
        if gpu is None:
            cache = self._number(settings, "actor.kv_cache_gib", int, default="1")
            parts.append(Part(f"{self.role} KV cache", cache * GIB, f"actor.kv_cache_gib={cache}"))
            programs = Part(f"{self.role} programs", PROCESS_BYTES, "2 processes of its engine")
            return [*parts, programs]
        frac = self._number(settings, "actor.gpu_memory_frac", float, default="0.85")
        rest = max(0, int(frac * gpu.memory_bytes) - weights)
        how = f"the rest of actor.gpu_memory_frac={frac:g} of its engine"
        return [*parts, Part(f"{self.role} cache, work space", rest, how)]

    def _number(
        self, settings: Mapping[str, str], key: str, kind: type[Number], *, default: str
    ) -> Number:
        """Return a setting as a number. Raises: ConfigError."""
        value = settings.get(key, default)
        try:
            return kind(value)
        except ValueError as error:
            names = {int: "a whole number", float: "a number"}
            where = f"{self.section}.serve=[{key}={value}]"
            raise ConfigError(f"{where}: expects {names[kind]}") from error


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {key: value for key, _, value in (each.partition("=") for each in overrides)}
