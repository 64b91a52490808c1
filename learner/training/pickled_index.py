"""Reads the index of a checkpoint that an older version of the product wrote: a pickle.

A pickle names functions, which the standard reader calls. This reader knows the names and the
operations of an index, and gives each name a stand-in that only keeps its values. All others are
refused.
"""

import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from common.errors import ConfigError
from learner.training.shards import remedy_without

_DCP = "torch.distributed.checkpoint"
_KINDS = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("learner.training.storage", "StoredTensor"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Value:
    """Stands in for an object of the pickle: its arguments and its state."""

    def __init__(self, kind: str, args: tuple[object, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


def _kind(module: object, name: object) -> str:
    """Return the stand-in of a name. Raises: UnpicklingError: it is none of an index."""
    is_dtype = module == "torch" and isinstance(getattr(torch, str(name), None), torch.dtype)
    if not is_dtype and (module, name) not in _KINDS:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")
    return str(name)


class _PickleReader:
    """Builds the values of a pickle from its operations. It has no operation that calls anything.

    The standard reader lets ten bytes allocate gigabytes, and a deeply nested key end the process.
    """

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []  # Sizes of the stack.
        self._memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        """Return the value of a pickle. Raises: UnpicklingError, and errors of damaged bytes."""
        for operation, argument, _ in pickletools.genops(content):
            self._apply(operation.name, argument)
        return self._stack[-1]

    def _apply(self, name: str, argument: Any) -> None:
        """Apply one operation."""
        stack = self._stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                return
            case "MARK":
                self._marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
                stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[name]())
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(name[-1]))))
            case "APPEND" | "APPENDS":
                items = self._pop(1) if name == "APPEND" else self._pop_to_mark()
                cast(list[object], self._top(list)).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if name == "SETITEM" else self._pop_to_mark()
                # Python cannot hash a deeply nested tuple.
                if not all(isinstance(key, (str, _Value)) for key in items[::2]):
                    raise pickle.UnpicklingError("a key is no text and no object")
                self._top(dict).update(zip(items[::2], items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case _:
                self._apply_to_object(name, argument)

    def _apply_to_object(self, name: str, argument: Any) -> None:
        """Apply an operation that names, makes or fills an object."""
        match name:
            case "GLOBAL":
                module, _, kind = argument.partition(" ")
                self._stack.append(_Name(_kind(module, kind)))
            case "STACK_GLOBAL":
                self._stack.append(_Name(_kind(*self._pop(2))))
            case "REDUCE" | "NEWOBJ":
                kind, args = self._pop(2)
                if not isinstance(kind, _Name) or not isinstance(args, tuple):
                    raise pickle.UnpicklingError("it makes an object of no kind")
                self._stack.append(_Value(kind.text, cast(tuple[object, ...], args)))
            case "BUILD":
                (state,) = self._pop(1)
                self._top(_Value).state = state
            case _:
                raise pickle.UnpicklingError(f"an index has no operation {name}")

    def _pop(self, count: int) -> list[Any]:
        """Remove and return the last values. Raises: IndexError: there are fewer."""
        begin = len(self._stack) - count
        if begin < (self._marks[-1] if self._marks else 0):
            raise IndexError("it takes more values than it has")
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        """Remove and return the values after the last mark."""
        items = self._stack[self._marks[-1] :]
        del self._stack[self._marks.pop() :]
        return items

    def _top(self, kind: type) -> Any:
        """Return the last value. Raises: UnpicklingError: it is of another type."""
        if not isinstance(self._stack[-1], kind):
            raise pickle.UnpicklingError(f"it fills a {type(self._stack[-1]).__name__}")
        return self._stack[-1]


@dataclass(frozen=True, slots=True)
class _Name:
    """A name of a class or a dtype in the pickle."""

    text: str


def read_pickled_index(path: Path) -> dict[str, Any]:
    """Return the index in a file `.metadata`, as JSON has it. Nothing that it names is called.

    Raises: ConfigError: the file is missing or damaged, or has other contents than an index.
    """
    try:
        return dict(_tensors(_PickleReader().read(path.read_bytes())))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: missing; {remedy_without(path.parents[1])}") from error
    # A damaged pickle raises errors of any of these types.
    except (
        *(pickle.UnpicklingError, EOFError, AttributeError, ImportError),
        *(IndexError, KeyError, MemoryError, TypeError, ValueError, OverflowError),
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{path}: damaged, {reason}; {remedy_without(path.parents[1])}"
        ) from error


def _tensors(metadata: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, entry of the index) of each tensor."""
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for key, place in metadata["storage_data"].items():
        if not isinstance(key["fqn"], str):
            raise pickle.UnpicklingError("a part has no name")
        places[key["fqn"], _size(key["offset"])] = _place(place)
    for name, tensor in metadata["state_dict_metadata"].items():
        parts: list[dict[str, Any]] = []
        for chunk in tensor["chunks"]:
            offsets = _size(chunk["offsets"])
            shape = _size(chunk["sizes"])
            parts.append({"offsets": offsets, "shape": shape, **places[name, offsets]})
        dtype = tensor["properties"].state[0]
        if not isinstance(dtype, _Name):
            raise pickle.UnpicklingError(f"{name!r} has no type of numbers")
        yield name, {"dtype": dtype.text, "shape": _size(tensor["size"]), "parts": parts}


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    (numbers,) = value.args
    if not all(isinstance(each, int) for each in numbers):
        raise pickle.UnpicklingError("a size has other values than numbers")
    return tuple(numbers)


def _place(value: Any) -> dict[str, Any]:
    """Return the place of a part: of this product's writer, or of the standard one."""
    if value.kind == "StoredTensor":
        file, start, num_bytes, *_ = value.state
        return {"file": file, "start": start, "num_bytes": num_bytes}
    place = {"file": value["relative_path"], "start": value["offset"], "num_bytes": value["length"]}
    if value.state.get("transform_descriptors"):
        raise ValueError("its tensors are compressed by an extension")
    return {**place, "is_archive": True}
