"""A device for tests: its tensors are computed on the CPU, and its transfers are counted.

PyTorch calls it "fake". Like a GPU it has memory of its own: the host reads a number only by a copy
or by an operation that waits for the device.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "fake"
# Operations whose result the host reads, or whose size depends on numbers.
WAITING = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.is_nonzero",
    "aten._unique",
    "aten.unique",
    "aten.repeat_interleave.Tensor",
)


class _Backend(_DummyBackendModule):
    """The part of a backend that autocast asks."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class OnDevice(torch.Tensor):
    """A tensor of the fake device around one of the CPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return _compute(func, args, kwargs or {}, None)


class FakeDevice(TorchDispatchMode):
    """Counts, while it is entered, the operations and transfers of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()  # Operations that wait for the device.
        self.uploads: Counter[str] = Counter()  # Copies to the device by kind.
        self.num_operations = 0

    def forget(self) -> None:
        """Start to count again."""
        self.waits.clear()
        self.uploads.clear()
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_made_there = device is not None and torch.device(device).type == NAME
        if is_made_there or any(isinstance(x, OnDevice) for x in _leaves((args, kwargs))):
            return _compute(func, args, kwargs, self)
        return func(*args, **kwargs)

    def note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = str(func)
        self.num_operations += 1
        if name.startswith(WAITING) or (name.startswith("aten.index") and _has_mask(args)):
            self.waits[name] += 1
        if name == "aten._to_copy.default":
            target = kwargs.get("device")
            if target is not None:
                self._note_copy(args[0], torch.device(target).type == NAME, kwargs)
        if name == "aten.copy_.default":
            is_there = isinstance(args[0], OnDevice)
            self._note_copy(args[1], is_there, {"non_blocking": len(args) > 2 and args[2]})

    def _note_copy(self, source: torch.Tensor, is_to_device: bool, how: dict[str, Any]) -> None:
        is_from_device = isinstance(source, OnDevice)
        if is_from_device and not is_to_device:
            self.waits["copy to the host"] += 1
        if is_to_device and not is_from_device:
            self.uploads["non_blocking" if how.get("non_blocking") else "blocking"] += 1


def _leaves(value: Any) -> Iterator[object]:
    """Yield the parts of nested arguments. PyTorch's own walk takes several times as long."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves([*value.values()])
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested arguments with each part changed."""
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    return change(value)


def _has_mask(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in _leaves(args[1]))


def _compute(func: Any, args: Any, kwargs: dict[str, Any], watch: FakeDevice | None) -> object:
    if watch is not None:
        watch.note(func, args, kwargs)
    target = kwargs.get("device")
    is_for_host = target is not None and torch.device(target).type != NAME
    is_for_host |= func is torch.ops.aten.copy_.default and not isinstance(args[0], OnDevice)
    own, named = _mapped(_inner, (args, kwargs))
    found = func(*own, **named)
    return found if is_for_host else _mapped(_outer, found)


def _inner(value: object) -> object:
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value.inner if isinstance(value, OnDevice) else value


def _outer(value: object) -> object:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def register() -> None:
    """Make the device known to torch. A process can do this once, and cannot undo it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    for name in ("empty_strided", "empty.memory_format"):
        _ATEN.impl(name, _factory(name), "PrivateUse1")
    _ATEN.impl("_copy_from", _copy_from, "PrivateUse1")


_ATEN = torch.library.Library("aten", "IMPL")


def _factory(name: str) -> Any:
    """Return a factory for tensors that torch's own code makes inside an operation."""
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: _compute(func, args, kwargs, None)


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> object:
    to: Any = _inner(target)
    to.copy_(_inner(source))
    return target
