"""A trainer's tensors by name: copied and written during training, and read back.

Each rank writes its shards, and any number of ranks reads them.
"""

import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from common.errors import ConfigError
from common.join.files import is_intact
from common.store.run_dir import sync_folder
from learner.policy.lora import trained_state
from learner.policy.weight_files import LOCAL
from learner.training.optimizer import BLOCK
from learner.training.ranks import Ranks
from learner.training.shards import ShardFile, missing_text, read_manifest
from learner.training.storage import DTYPES, files_needed, read_index, read_state, write_state

logger = logging.getLogger(__name__)

PART_BYTES = 32_000_000  # Content of one message between two nodes.


def find_shards(tensors: Path, needed: Iterable[str], ranks: Ranks) -> dict[str, Path]:
    """Return the places on this node of the files that other nodes wrote, by name.

    A node searches its own disk and compares the digests. A file that only another node has is
    sent by that node, and stays here. All ranks call this function together.

    Example (2 nodes of 2 ranks): the operators of node 1 and node 2 have exchanged their keys.
    Each node finds the files of the other one on its disk, and receives its own from there.

    Args:
        tensors: folder of tensors of the checkpoint.
        needed: names of the files that this rank reads.

    Raises: ConfigError: no node has a file, or its node cannot write it.
    """
    files = {each.name: each for each in read_manifest(tensors.parent)}
    if not files:
        return {}
    with ranks.in_touch("the search for files of the checkpoint"):
        wanted = [set(names) & files.keys() for names in ranks.exchange(sorted(needed))]
        by_node = [set[str]() for _ in range(ranks.num_nodes)]
        for rank, names in enumerate(wanted):
            by_node[ranks.node_of(rank)] |= names
        everything = sorted(set[str]().union(*by_node))
        searched = [files[name] for name in everything[ranks.local_index :: ranks.local_ranks]]
        places_of_ranks: list[dict[str, str]] = ranks.exchange(_held(searched, tensors, ranks))
        holders = _holders(places_of_ranks)
        missing = [files[name] for name in everything if name not in holders]
        if missing:
            raise ConfigError(_missing(tensors, missing, ranks))
        places = _places_here(places_of_ranks, ranks)
        errors = [""]
        for file, source, target in _transfers(files, by_node, places_of_ranks, holders, ranks):
            if ranks.index == source:
                _send(Path(places_of_ranks[source][file.name]), file, target, ranks)
            elif ranks.index == target:
                errors.append(_receive(_target(file, tensors, ranks), file, source, ranks))
        problems = [text for text in ranks.exchange(max(errors)) if text]
        if problems:
            raise ConfigError("; ".join(problems))
        received = {name: _target(files[name], tensors, ranks) for name in by_node[ranks.node]}
    return received | places


def _held(files: Iterable[ShardFile], tensors: Path, ranks: Ranks) -> dict[str, str]:
    """Return the places of those files that are on this node with the right digest."""
    places = {file.name: _find(file, tensors, ranks) for file in files}
    return {name: str(path) for name, path in places.items() if path is not None}


def _find(file: ShardFile, tensors: Path, ranks: Ranks) -> Path | None:
    candidates = [Path(file.path)] if ranks.home is None else ranks.home.candidates(file)
    places = dict.fromkeys([tensors / file.name, *candidates])
    return next((path for path in places if is_intact(path, file)), None)


def _holders(places_of_ranks: list[dict[str, str]]) -> dict[str, int]:
    """Return the first rank that has each file."""
    return {name: rank for rank, names in reversed([*enumerate(places_of_ranks)]) for name in names}


def _places_here(places_of_ranks: list[dict[str, str]], ranks: Ranks) -> dict[str, Path]:
    """Return the places of the files that the ranks of this node have found."""
    ours = [
        names for rank, names in enumerate(places_of_ranks) if ranks.node_of(rank) == ranks.node
    ]
    return {name: Path(path) for names in ours for name, path in names.items()}


def _transfers(
    files: Mapping[str, ShardFile],
    by_node: list[set[str]],
    places_of_ranks: list[dict[str, str]],
    holders: Mapping[str, int],
    ranks: Ranks,
) -> Iterator[tuple[ShardFile, int, int]]:
    """Yield (file, sending rank, receiving rank) in the same order on all ranks."""
    for node, names in enumerate(by_node):
        first = node * ranks.local_ranks
        here = set[str]().union(*places_of_ranks[first : first + ranks.local_ranks])
        for name in sorted(names - here):
            yield files[name], holders[name], first


def _missing(tensors: Path, missing: list[ShardFile], ranks: Ranks) -> str:
    """Return the error for missing files. Other nodes do not know the checkpoint's real folder."""
    if ranks.index:
        names = ", ".join(each.name for each in missing)
        return f"no node has the files {names} of the checkpoint; the error of rank 0 has a remedy"
    return missing_text(tensors.parent, missing)


def _target(file: ShardFile, tensors: Path, ranks: Ranks) -> Path:
    """Return the place of a received file: the checkpoint itself on rank 0's node."""
    return tensors / file.name if ranks.home is None else ranks.home.candidates(file)[-1]


def _parts(num_bytes: int) -> Iterator[int]:
    """Yield the sizes of the messages of a file."""
    for start in range(0, num_bytes, PART_BYTES):
        yield min(PART_BYTES, num_bytes - start)


def _send(path: Path, file: ShardFile, target: int, ranks: Ranks) -> None:
    """Send a file to another rank. Raises: OSError: it cannot be read."""
    with path.open("rb") as source:
        for size in _parts(file.num_bytes):
            part = torch.frombuffer(bytearray(source.read(size)), dtype=torch.uint8)
            dist.send(part, target, group=ranks.saving)


def _receive(path: Path, file: ShardFile, source: int, ranks: Ranks) -> str:
    """Write a file that another rank sends; return why it is not here then, or ""."""
    digest = hashlib.sha256()

    def parts() -> Iterator[memoryview]:
        for size in _parts(file.num_bytes):
            part = torch.empty(size, dtype=torch.uint8)
            dist.recv(part, source, group=ranks.saving)
            content = memoryview(cast(Any, part.numpy()))
            digest.update(content)
            yield content

    left = parts()
    try:
        _write(path, left)
    except OSError as error:
        for _ in left:  # The sender waits until each part is received.
            pass
        return f"learner node {ranks.node} cannot write {path}: {error.strerror}"
    if digest.hexdigest() != file.sha256:
        path.unlink()
        return f"{path}: damaged in transfer from rank {source}"
    logger.info("received file=%s from_rank=%d bytes=%d", path, source, file.num_bytes)
    return ""


def _write(path: Path, parts: Iterator[memoryview]) -> None:
    """Write and sync a file. It has its name once it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb", buffering=0) as out:
        for part in parts:
            while part:
                part = part[out.write(part) or 0 :]
        os.fsync(out.fileno())
    partial.rename(path)
    sync_folder(path.parent)


# Name prefix of optimizer state; the parameter's name and the state's key follow.
MOMENTS = "optimizer."


class StateWriter:
    """Copies a state to the host, then writes it in a thread. One write runs at a time.

    The copies stay allocated for the next write. On GPUs they are in pinned memory, for full speed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.copies: dict[str, Tensor] = {}  # Tensors of the newest state by name.
        self._last: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, "state")

    def start(self, state: Mapping[str, Tensor], folder: Path) -> Future[dict[str, Tensor] | None]:
        """Copy the state; return a future that is done when all ranks have written it.

        Training may change the state after the return. The result is the copies of a single rank,
        which stay unchanged until the next call; None: several ranks have only their shards.
        """
        if self._last is not None:
            wait([self._last])  # The caller that started this write handles its errors.
        self.copy(state)
        self._last = self._thread.submit(self._write, dict(self.copies), folder)
        return self._last

    def _write(self, copies: dict[str, Tensor], folder: Path) -> dict[str, Tensor] | None:
        """Write the copies of all ranks; return the copies of a single rank."""
        ranks = self._ranks
        home = ranks.home if ranks.writes_home and ranks.files.is_remote else None
        if home is not None and ranks.local_index == 0:
            home.remove_old(folder, ranks.files.names)
        write_state(copies, folder, ranks, home=home)
        return copies if ranks.saving is None else None

    @torch.no_grad()
    def copy(self, state: Mapping[str, Tensor]) -> None:
        """Copy tensors to the host; a shard stays a shard."""
        copies: dict[str, Tensor] = {}
        for name, value in state.items():
            plain = value.detach()
            copy = self.copies.get(name)
            if copy is None or copy.shape != plain.shape:
                copy = _host_copy(plain)
            local_part(copy).copy_(local_part(plain), non_blocking=True)
            copies[name] = copy
        self.copies = copies
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole of an unsharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_copy(tensor: Tensor) -> Tensor:
    """Return host memory for a tensor, or for this rank's shard of one."""
    local = local_part(tensor)
    empty = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
    return _like(tensor, empty)


def _like(pattern: Tensor, local: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return a local tensor as a shard with the size and placement of `pattern`.

    Args:
        shape: shape of the whole tensor, if it differs; contiguous.
    """
    if not isinstance(pattern, DTensor):
        return local
    stride = (shape[1], 1) if shape else pattern.stride()
    meta = TensorMeta(shape or pattern.shape, stride, local.dtype)
    spec = DTensorSpec(pattern.device_mesh, pattern.placements, tensor_meta=meta)
    # `from_local` would copy offloaded tensors to the device of the mesh.
    return DTensor(local, spec, requires_grad=False)


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored form of a tensor: itself, or 8-bit codes and the scales of their blocks.

    Numbers would not restore the same codes: a block whose largest number is negative is rounded
    below its scale.
    """
    local: Any = local_part(tensor.detach())
    if not hasattr(local, "codes"):
        yield name, tensor
        return
    yield f"{name}.codes", _like(tensor, local.codes)
    row = tensor.numel() // len(tensor)
    per_row = math.lcm(row, BLOCK) // BLOCK  # The scales are sharded like the codes: by whole rows.
    scale = local.scale.view(-1, per_row)
    shape = torch.Size((tensor.numel() // BLOCK // per_row, per_row))
    yield f"{name}.scale", _like(tensor, scale, shape)


def live_tensors(
    modules: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return all tensors that training changes, by name: weights first, then moments.

    Args:
        modules: modules by the prefix of their weights' names.
    """
    weights = _weights(modules)
    names = {id(tensor): name for name, tensor in weights.items()}
    moments = {
        name: part
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        for name, part in _stored(f"{MOMENTS}{names[id(parameter)]}.{key}", value)
    }
    return weights | moments


def _weights(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the trained weights by name; tied weights have their first name only."""
    named = {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in trained_state(module).items()
    }
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


@torch.no_grad()
def restore(
    folder: Path,
    modules: Mapping[str, nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    ranks: Ranks | None = None,
) -> None:
    """Load weights and moments that any number of ranks wrote; each rank reads its own shards.

    All `ranks` call this function together; None is a single rank.

    Raises: ConfigError: the tensors belong to another model or optimizer, or a file is missing.
    """
    ranks = ranks or Ranks()
    saved = read_index(folder)
    weights = _weights(modules)
    others = {name for name in saved if not name.startswith(MOMENTS)}
    if others != weights.keys() or any(
        saved[name].shape != tuple(weight.shape) for name, weight in weights.items()
    ):
        raise ConfigError(
            f"{folder}: the saved weights do not fit this model; resume with the model.path and"
            " learner.lora of the checkpoint"
        )
    owners = {id(tensor): name for name, tensor in weights.items()}
    optimizers = list(optimizers)
    for optimizer in optimizers:
        _make_moments(optimizer, owners, set(saved))
    live = live_tensors(modules, optimizers)
    if live.keys() != saved.keys():
        kinds = sorted({name.rpartition(".")[2] for name in live.keys() ^ saved.keys()})
        raise ConfigError(
            f"{folder}: the saved moments do not fit this optimizer ({', '.join(kinds)}). Continue"
            " with the learner.optimizer and learner.moments of the checkpoint. With 8bit moments,"
            " learner.num_ranks must also be the same."
        )
    targets = {name: weight.detach() for name, weight in live.items()}
    places = find_shards(folder, files_needed(saved, targets), ranks)
    read_state(folder, saved, targets, ranks.files, places=places)


def _make_moments(
    optimizer: torch.optim.Optimizer, owners: Mapping[int, str], saved: set[str]
) -> None:
    """Create an optimizer's moments with a step of rate 0 and zero gradients."""
    begun = {n.removeprefix(MOMENTS).rpartition(".")[0] for n in saved if n.startswith(MOMENTS)}
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for parameter in group["params"]:
            if owners[id(parameter)] in begun:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def read_weights(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without prefix, whole tensor on the host) of the saved weights."""
    entries = {
        name: entry for name, entry in read_index(folder).items() if name.startswith(f"{prefix}.")
    }
    wholes = {
        n: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for n, entry in entries.items()
    }
    read_state(folder, entries, wholes, LOCAL)
    for name, whole in wholes.items():
        yield name.removeprefix(f"{prefix}."), whole
