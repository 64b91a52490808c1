"""The tensors of a checkpoint on disk: an index in JSON, and files with the bytes of the shards.

The writer runs in a thread beside training. A file is written by a few system calls, which release
Python's lock. Nothing that is read here can run code.
"""

import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from common.errors import ConfigError, LongstrideError
from common.store.run_dir import write_atomically
from common.text import is_file_name
from learner.policy.weight_files import WeightFiles
from learner.training.pickled_index import read_pickled_index
from learner.training.ranks import Ranks
from learner.training.shard_home import ShardHome, ShardNotWritten
from learner.training.shards import ShardFile, remedy_without, write_manifest

INDEX = "tensors.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

Size = Annotated[int, Field(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A part of a tensor, such as one rank's shard, and its place in a file of the checkpoint."""

    offsets: tuple[Size, ...]  # Position in the tensor of the part's first number.
    shape: tuple[Size, ...]
    file: str
    start: Size  # bytes
    num_bytes: Size
    # The bytes are a file of `torch.save`: an older version's writer wrote one for each tensor.
    is_archive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, and its parts."""

    dtype: str  # A name in `DTYPES`.
    shape: tuple[Size, ...]
    parts: list[TensorPart]

    def overlapping(self, region: "Region") -> list[TensorPart]:
        """Return the parts that have numbers of a region."""
        return [part for part in self.parts if region.overlap(Region(part.offsets, part.shape))]


StateIndex = dict[str, StoredTensor]
_INDEX: TypeAdapter[StateIndex] = TypeAdapter(StateIndex)


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Region") -> "Region | None":
        """Return the block that two blocks share; None without one."""
        first = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(begin + size, start + length)
            for begin, size, start, length in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        ]
        shape = tuple(end - begin for begin, end in zip(first, ends, strict=True))
        return Region(first, shape) if all(size > 0 for size in shape) else None

    def within(self, tensor: Tensor, outer: "Region") -> Tensor:
        """Return the view of this block in the tensor of an outer block."""
        for dim, (begin, origin) in enumerate(zip(self.offsets, outer.offsets, strict=True)):
            tensor = tensor.narrow(dim, begin - origin, self.shape[dim])
        return tensor


def region_of(tensor: Tensor) -> Region:
    """Return the block of the whole tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Region(tuple(offsets), tuple(shape))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# A block that a rank has: name, dtype, shape of the whole, offsets and shape of the block.
_Block = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def write_state(
    state: Mapping[str, Tensor], folder: Path, ranks: Ranks, *, home: ShardHome | None = None
) -> None:
    """Write the tensors of all ranks, which call this function together; rank 0 adds the index.

    A tensor or shard that several ranks have is written by one of them.

    Args:
        home: folder of this node for the file of this rank. The checkpoint then gets a manifest.

    Raises: OSError, ShardNotWritten: a rank cannot write its file; RankLost; LongstrideError:
        another fault of a rank.
    """
    own_blocks: list[_Block] = []
    for name, tensor in state.items():
        region = region_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        own_blocks.append((name, dtype, tuple(tensor.shape), region.offsets, region.shape))
    with ranks.in_touch("the plan of a checkpoint"):
        blocks = [[_as_block(block) for block in rank] for rank in ranks.exchange(own_blocks)]
    # Each rank reads the tensors that all ranks share. Rank 0's node can send parts of files.
    written = _divide(blocks, to_lowest=ranks.writes_home)
    parts = [
        _bytes_of(_local(state[name]).detach().contiguous()) for name, *_ in written[ranks.index]
    ]
    file, error = _written(folder / _file_of(ranks.index), parts, ranks.files, home)
    _share_results(file, error, folder, ranks)
    if ranks.index == 0:
        write_index(folder, _index_of(written))


def _as_block(block: Sequence[Any]) -> _Block:
    """Return a block that arrived as JSON."""
    name, dtype, shape, offsets, part_shape = block
    return name, dtype, tuple(shape), tuple(offsets), tuple(part_shape)


def _file_of(rank: int) -> str:
    return f"__{rank}_0.bin"


def _divide(blocks: Sequence[Sequence[_Block]], *, to_lowest: bool) -> list[list[_Block]]:
    """Return the blocks that each rank writes: shared ones go to the rank with the fewest bytes.

    Args:
        to_lowest: shared blocks go to their lowest rank.
    """
    holders: defaultdict[_Block, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(blocks):
        for block in of_rank:
            holders[block].append(rank)
    loads = [0] * len(blocks)
    written: list[list[_Block]] = [[] for _ in blocks]
    for block in sorted(holders, key=lambda each: len(holders[each])):  # Stable: own blocks first.
        owner = holders[block][0]
        if not to_lowest:
            owner = min(holders[block], key=lambda rank: loads[rank])
        loads[owner] += _num_bytes(block[1], block[4])
        written[owner].append(block)
    return written


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _index_of(written: Iterable[Iterable[_Block]]) -> StateIndex:
    """Return the index of the files that hold the blocks of each rank one after another."""
    index: StateIndex = {}
    for rank, blocks in enumerate(written):
        start = 0
        for name, dtype, shape, offsets, part_shape in blocks:
            tensor = index.setdefault(name, StoredTensor(dtype=dtype, shape=shape, parts=[]))
            num_bytes = _num_bytes(dtype, part_shape)
            tensor.parts.append(
                TensorPart(
                    offsets=offsets,
                    shape=part_shape,
                    file=_file_of(rank),
                    start=start,
                    num_bytes=num_bytes,
                )
            )
            start += num_bytes
    return index


def _written(
    path: Path, parts: list[memoryview], files: WeightFiles, home: ShardHome | None
) -> tuple[ShardFile | None, Exception | None]:
    """Write the file of this rank; return its entry of the manifest, and the error."""
    try:
        return _write(path, parts, files, home), None
    except Exception as error:  # noqa: BLE001 - the other ranks wait for the result.
        return None, error


def _write(
    path: Path, parts: list[memoryview], files: WeightFiles, home: ShardHome | None
) -> ShardFile | None:
    """Write and sync the file of this rank; return its entry of the manifest, if it is at home."""
    if home is not None:
        return home.write(path, parts) if parts else None
    if not files.is_remote:  # Rank 0's node makes the folder for the others.
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, parts)
    return None


def _share_results(
    file: ShardFile | None, error: Exception | None, folder: Path, ranks: Ranks
) -> None:
    """Exchange what the ranks have written; rank 0 writes the manifest of files on other nodes.

    Raises: the error of the first rank that failed.
    """
    failed = None if error is None else [getattr(error, "errno", None) or 0, str(error)]
    with ranks.in_touch("the write of a checkpoint"):
        results = ranks.exchange([None if file is None else asdict(file), failed])
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(results):
        if failure is not None:
            number, text = failure
            text = f"learner rank {rank}: {text}"
            if not number:
                raise LongstrideError(f"{folder}: {text}")
            is_elsewhere = ranks.node_of(rank) > 0
            raise ShardNotWritten(number, text) if is_elsewhere else OSError(number, text)
    manifest = {ShardFile(**entry) for entry, _ in results if entry is not None}
    if manifest and ranks.index == 0:
        write_manifest(folder.parent, manifest)


def write_index(folder: Path, index: StateIndex) -> None:
    """Write the index of a folder of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: asdict(each) for name, each in index.items()}
    write_atomically(folder / INDEX, json.dumps(content))


def read_index(folder: Path) -> StateIndex:
    """Return the index of a folder of tensors. Raises: ConfigError: it is damaged or missing."""
    path = folder / INDEX
    try:
        if path.exists():
            index = _INDEX.validate_json(path.read_bytes())
        else:
            path = folder / ".metadata"
            index = _INDEX.validate_python(read_pickled_index(path))
    except ValidationError as error:
        raise _damaged(path, str(error.errors()[0]["msg"])) from error
    for name, tensor in index.items():
        if problem := _problem(tensor):
            raise _damaged(path, f"{name!r}: {problem}")
    return index


def convert_pickled_index(folder: Path) -> None:
    """Write the index of tensors of an older version in JSON, the form that nodes receive."""
    if not (folder / INDEX).exists():
        write_index(folder, read_index(folder))


def _problem(tensor: StoredTensor) -> str:
    """Return why an entry of an index cannot be read, "" if it can."""
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype!r} is no type of numbers"
    for part in tensor.parts:
        if not is_file_name(part.file):
            return f"{part.file!r} is not a plain file name"
        if not len(part.offsets) == len(part.shape) == len(tensor.shape):
            return "a part has another number of dimensions"
        ends = map(sum, zip(part.offsets, part.shape, strict=True))
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            return "a part lies outside of the tensor"
        if not part.is_archive and part.num_bytes != _num_bytes(tensor.dtype, part.shape):
            return f"{part.num_bytes} bytes are not the bytes of a part"
    # A number that two parts have would count twice, and hide one that no part has.
    regions = [Region(part.offsets, part.shape) for part in tensor.parts]
    if any(one.overlap(other) for one, other in combinations(regions, 2)):
        return "two parts overlap"
    return ""


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}: damaged, {reason}; {remedy_without(path.parents[1])}")


def files_needed(index: StateIndex, wanted: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the files that have the numbers of these tensors or shards."""
    return {
        part.file
        for name, tensor in wanted.items()
        for part in index[name].overlapping(region_of(tensor))
    }


def read_state(
    folder: Path,
    index: StateIndex,
    wanted: Mapping[str, Tensor],
    files: WeightFiles,
    *,
    places: Mapping[str, Path] | None = None,
) -> None:
    """Fill tensors or this rank's shards of them, which have the shapes of the index.

    Args:
        places: paths on this node of files that are not in the folder, by name.

    Raises: ConfigError: a file or a part is missing or too short.
    """
    places = places or {}
    for name, tensor in wanted.items():
        stored = index[name]
        region = region_of(tensor)
        target = _local(tensor).detach()
        num_filled = 0
        for part in stored.overlapping(region):
            path = places.get(part.file, folder / part.file)
            try:
                source = _read(files, path, part, stored.dtype)
            except (EOFError, FileNotFoundError) as error:
                raise ConfigError(f"{error}; {remedy_without(folder.parent)}") from error
            stored_region = Region(part.offsets, part.shape)
            shared = region.overlap(stored_region)
            assert shared is not None
            shared.within(target, region).copy_(shared.within(source, stored_region))
            num_filled += math.prod(shared.shape)
        if num_filled < target.numel():
            raise _damaged(folder / INDEX, f"it lacks parts of {name!r}")


def _read(files: WeightFiles, path: Path, part: TensorPart, dtype: str) -> Tensor:
    """Return a part of a tensor. Raises: EOFError, FileNotFoundError."""
    try:
        content = torch.empty(part.num_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # An index may give any size of an archive.
        raise _damaged(path, f"a part of {part.num_bytes} bytes does not fit") from error
    files.read(path, part.start, _bytes_of(content))
    if not part.is_archive:
        return content.view(DTYPES[dtype]).view(part.shape)
    tensor = torch.load(
        io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True
    )
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != part.shape:
        raise _damaged(path, "a part has another shape than its index")
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
