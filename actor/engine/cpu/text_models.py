"""Registration of vLLM's models on a CPU.

The modules of models for images, such as Qwen3.5 and Mistral 3, import torchvision or
mistral_common for their processors. The environment for CPUs lacks both: the builds of torchvision
on PyPI need CUDA's torch. An engine computes text only and uses no processor of images, so such a
module is imported with placeholders for them.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm.model_executor.models.registry import (
    ModelRegistry,
    _LazyRegisteredModel,  # pyright: ignore
)

OPTIONAL = ("torchvision", "mistral_common")  # Packages for processors of images.
MARK = "MULTIMODAL_REGISTRY"  # vLLM's modules register their processors of images with it.


def register_text_models(architectures: Sequence[str]) -> None:
    """Register these classes of models with vLLM in this process.

    vLLM would import a new class in a separate process, so that this one does not initialise CUDA.
    On a CPU that would only take time: fifteen CPU seconds for each class.
    """
    for name in architectures:
        entry = ModelRegistry.models.get(name)
        if not isinstance(entry, _LazyRegisteredModel):
            continue
        lacks_images = bool(_missing()) and _has_images(entry.module_name)
        # vLLM's own import reports a module that cannot be imported.
        with suppress(ImportError), placeholders() if lacks_images else nullcontext():
            ModelRegistry.register_model(name, entry.load_model_cls())


def _missing() -> list[str]:
    """Return the optional packages that this environment lacks."""
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is None]


def _has_images(module: str) -> bool:
    """Return whether a module of vLLM also holds a variant for images."""
    spec = importlib.util.find_spec(module)
    origin = None if spec is None else spec.origin
    return origin is not None and MARK in Path(origin).read_text(encoding="utf-8")


@contextmanager
def placeholders() -> Iterator[None]:
    """Let imports of missing optional packages within the context give placeholders."""
    # These modules import torchvision if it exists, so they must not get a placeholder.
    import transformers.image_utils
    import transformers.video_utils  # noqa: F401

    finder = _Placeholders(_missing())
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


class _Placeholders(MetaPathFinder, Loader):
    """Makes empty modules whose attributes are empty classes."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        self.made: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a spec for a missing module, None for any other module."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        self.made.append(fullname)
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Make every attribute of the module an empty class."""

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Empty(name, (), {})

        module.__dict__["__getattr__"] = attribute


class _Empty(type):
    """A class whose attributes are the class itself."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls
