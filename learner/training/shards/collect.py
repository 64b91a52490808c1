"""Finds the files of a checkpoint on the nodes of the learner, and copies them between nodes."""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from common.errors import ConfigError
from common.join.files import is_intact
from common.join.shards import ShardFile, missing_text, read_manifest
from common.store.run_dir import sync_folder
from learner.training.ranks import Ranks

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
        own = [files[name] for name in everything[ranks.local_index :: ranks.local_ranks]]
        held: list[dict[str, str]] = ranks.exchange(_held(own, tensors, ranks))
        holders = _holders(held)
        missing = [files[name] for name in everything if name not in holders]
        if missing:
            raise ConfigError(_missing(tensors, missing, ranks))
        places = _places_here(held, ranks)
        errors = [""]
        for file, source, target in _transfers(files, by_node, held, holders, ranks):
            if ranks.index == source:
                _send(Path(held[source][file.name]), file, target, ranks)
            elif ranks.index == target:
                errors.append(_receive(_target(file, tensors, ranks), file, source, ranks))
        problems = [text for text in ranks.exchange(max(errors)) if text]
        if problems:
            raise ConfigError("; ".join(problems))
        received = {name: _target(files[name], tensors, ranks) for name in by_node[ranks.node]}
    return received | places


def _held(files: Iterable[ShardFile], tensors: Path, ranks: Ranks) -> dict[str, str]:
    """Return the places of those files that are on this node with the right digest."""
    found = {file.name: _find(file, tensors, ranks) for file in files}
    return {name: str(path) for name, path in found.items() if path is not None}


def _find(file: ShardFile, tensors: Path, ranks: Ranks) -> Path | None:
    own = [Path(file.path)] if ranks.home is None else ranks.home.candidates(file)
    places = dict.fromkeys([tensors / file.name, *own])
    return next((path for path in places if is_intact(path, file)), None)


def _holders(held: list[dict[str, str]]) -> dict[str, int]:
    """Return the first rank that has each file."""
    return {name: rank for rank, names in reversed([*enumerate(held)]) for name in names}


def _places_here(held: list[dict[str, str]], ranks: Ranks) -> dict[str, Path]:
    """Return the places of the files that the ranks of this node have found."""
    ours = [names for rank, names in enumerate(held) if ranks.node_of(rank) == ranks.node]
    return {name: Path(path) for names in ours for name, path in names.items()}


def _transfers(
    files: Mapping[str, ShardFile],
    by_node: list[set[str]],
    held: list[dict[str, str]],
    holders: Mapping[str, int],
    ranks: Ranks,
) -> Iterator[tuple[ShardFile, int, int]]:
    """Yield (file, sending rank, receiving rank) in the same order on all ranks."""
    for node, names in enumerate(by_node):
        first = node * ranks.local_ranks
        here = set[str]().union(*held[first : first + ranks.local_ranks])
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
