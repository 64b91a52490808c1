"""Reads the index of a checkpoint that an older version of the product wrote: a pickle.

A pickle names functions, which the standard reader calls. This reader knows the names of an index,
and gives each a stand-in that only keeps its values. Every other name is refused.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from common.join.shards import remedy_without

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

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that refuses each name that is not one of an index."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stand-in for a name. Raises: UnpicklingError: it is none of an index."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) not in _KINDS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")
        return type(name, (_Value,), {})  # A new class each time: a pickle may change a class.


def read_pickled_index(path: Path) -> dict[str, Any]:
    """Return the index in a file `.metadata`, as JSON has it. Nothing that it names is called.

    Raises: ConfigError: the file is missing or damaged, or has other contents than an index.
    """
    try:
        with path.open("rb") as file:
            index: Any = _IndexUnpickler(file).load()
        return dict(_tensors(index))
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
        places[key["fqn"], _size(key["offset"])] = _place(place)
    for name, tensor in metadata["state_dict_metadata"].items():
        parts: list[dict[str, Any]] = []
        for chunk in tensor["chunks"]:
            offsets = _size(chunk["offsets"])
            shape = _size(chunk["sizes"])
            parts.append({"offsets": offsets, "shape": shape, **places[name, offsets]})
        dtype = tensor["properties"].state[0]
        yield name, {"dtype": dtype, "shape": _size(tensor["size"]), "parts": parts}


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    (numbers,) = value.args
    return tuple(numbers)


def _place(value: Any) -> dict[str, Any]:
    """Return the place of a part: of this product's writer, or of the standard one."""
    if type(value).__name__ == "StoredTensor":
        file, start, num_bytes, *_ = value.state
        return {"file": file, "start": start, "num_bytes": num_bytes}
    place = {"file": value["relative_path"], "start": value["offset"], "num_bytes": value["length"]}
    if value.state.get("transform_descriptors"):
        raise ValueError("its tensors are compressed by an extension")
    return {**place, "is_archive": True}
