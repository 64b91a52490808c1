"""The learner's ranks: each computes its share of a batch and keeps its shard of the weights."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import heapq
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common.errors import RankLost
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import Trajectory
from learner.batch.batching import OF_TEACHER, Sample
from learner.policy.weight_files import LOCAL, WeightFiles
from learner.training.shard_home import ShardHome

# Time limit for all ranks to write their shards of a checkpoint.
SAVE_TIMEOUT = timedelta(minutes=30)
ABSENT = -1  # Length that encodes a missing array.


class RankOperation(NamedTuple):
    """The next operation of all ranks, sent by rank 0."""

    # "train", "score", "save", "checksums", "free_memory", "warm_up" or "configure", see `Trainer`
    kind: str
    version: int = 0
    must_train: bool = False
    must_skip: bool = False
    payload: bytes = b""


class Ranks:
    """The processes that train one policy together. A single rank needs no mesh.

    Losses are divided by the counts of the whole minibatch, so the sum of the ranks' gradients is
    the gradient of one large batch. All ranks make the same passes, since each pass gathers the
    sharded weights of all ranks.

    A batch is divided into shares. Each rank computes one, or the ranks of a sequence group compute
    one together: each computes a part of every packed row, and the loss of the whole row.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        *,
        publish_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        expert_mesh: DeviceMesh | None = None,
        files: WeightFiles = LOCAL,
        local_ranks: int = 0,
        home: ShardHome | None = None,
        writes_home: bool = False,
    ) -> None:
        """Wrap a mesh over the default process group; None is a single rank.

        A mesh of two dimensions is [copy, shard]: each of its rows has one copy of the weights.

        Args:
            publish_group: group of the same ranks, for the thread that gathers weights during
                training.
            sequence_group: adjacent ranks that compute a share together; None: this rank alone.
            expert_mesh: mesh [expert] or [copy, expert] of the same ranks, whose rows divide the
                experts; None: each rank gathers all experts.
            files: access of this rank to the files of weights and checkpoints.
            local_ranks: number of ranks on each node; 0: all.
            home: this node's folder for files of checkpoints; None: rank 0's node.
            writes_home: whether ranks whose `files` are remote write their files to `home`.
        """
        self.files = files
        self.home = home
        self.writes_home = writes_home
        # On rank 0, returns which rank or node is lost after a lost connection; "" if unknown.
        self.explain: Callable[[], str] = lambda: ""
        self.store: object = None  # The rendezvous, which the process group uses.
        self.mesh = mesh
        self.expert_mesh = expert_mesh
        self.publish_group: dist.ProcessGroup | None = publish_group
        self.index = 0 if mesh is None else dist.get_rank()
        self.size = 1 if mesh is None else mesh.size()
        self.local_ranks = local_ranks or self.size
        self.sequence_group: dist.ProcessGroup | None = sequence_group
        group_size = 1 if sequence_group is None else sequence_group.size()
        self.share = self.index // group_size  # Number of this rank's share of a batch.
        self.num_shares = self.size // group_size
        self._is_first_of_share = self.index % group_size == 0
        # Checkpoints need their own group: a thread writes them during training.
        self.saving: dist.ProcessGroup | None = None
        if mesh is not None:
            group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)  # This rank is a member of the group.
            self.saving = group

    @property
    def publish_device(self) -> str:
        """The device of the tensors that `publish_group` transfers."""
        return "cpu" if self.mesh is None else self.mesh.device_type

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of(self.index)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.size // self.local_ranks

    @property
    def local_index(self) -> int:
        """The number of this rank among the ranks of its node."""
        return self.index % self.local_ranks

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return rank // self.local_ranks

    def exchange(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass, by rank, as JSON restores them."""
        content = json.dumps(value).encode()
        if self.saving is None:
            return [json.loads(content)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self.saving)
        longest = int(max(sizes))
        sent = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
        gathered = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(gathered, sent, group=self.saving)
        return [json.loads(each.numpy().tobytes()) for each in gathered]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor that has the same shape on each."""
        if self.mesh is None:
            return values
        summed = values.to(self.mesh.device_type, copy=True)  # NCCL accepts only CUDA tensors.
        dist.all_reduce(summed)
        return summed.to(values.device)

    def sum_shares(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the shares: one rank of each sequence group counts."""
        return self.sum(values if self._is_first_of_share else torch.zeros_like(values))

    def send(self, payload: bytes) -> None:
        """Send bytes from rank 0 to all other ranks."""
        assert self.mesh is not None
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(sent.to(self.mesh.device_type), 0)

    def receive(self, num_bytes: int) -> bytes:
        """Return the bytes that rank 0 sends in the same broadcast."""
        assert self.mesh is not None
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.mesh.device_type)
        dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    @contextmanager
    def in_touch(self, what: str) -> Iterator[None]:
        """Add rank, operation and loss to an error of a collective. Raises: RankLost."""
        try:
            yield
        except RuntimeError as error:
            if self.mesh is None:
                raise
            reason = " ".join(str(error).split())[:300]
            rank = f"learner rank {self.index} of {self.size}"
            text = f"{rank} lost the connection to another rank during {what}: {reason}"
            lost = self.explain()
            raise RankLost(f"{lost} ({text})" if lost else text) from error


def deal(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each item: largest costs first, each to the rank with the least load."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """Return samples as bytes: trajectory records, advantages, and the sizes to split them.

    The critic's columns are not included: each rank computes them itself.
    """
    records = [np.frombuffer(pack_record(sample.trajectory), dtype=np.uint8) for sample in samples]
    file = io.BytesIO()
    np.savez(
        file,
        records=np.concatenate(records),
        record_sizes=np.array([len(record) for record in records]),
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float64),
        **_joined("turn", [sample.turn_advantages for sample in samples]),  # pyright: ignore[reportArgumentType]
        **_joined("own", [sample.own_advantages for sample in samples]),
        **{name: column for name in OF_TEACHER if (column := _column(name, samples)) is not None},
    )
    return file.getvalue()


def unpack_samples(payload: bytes) -> list[Sample]:
    """Return the samples of `pack_samples`. Raises: WireError, ValueError."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        records = np.split(arrays["records"], np.cumsum(arrays["record_sizes"])[:-1])
        advantages = arrays["advantages"].tolist()
        turn, token = (_split_array(arrays[f"{n}"], arrays[f"{n}_sizes"]) for n in ("turn", "own"))
        taught = {name: arrays[name] for name in OF_TEACHER if name in arrays}
    samples: list[Sample] = []
    for record, advantage, of_turns, of_tokens in zip(
        records, advantages, turn, token, strict=True
    ):
        trajectory = unpack_record(record.tobytes())
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"expected a Trajectory, got {type(trajectory).__name__}")
        samples.append(
            Sample(
                trajectory=trajectory,
                advantage=advantage,
                turn_advantages=of_turns,
                own_advantages=of_tokens,
            )
        )
    return _with_columns(samples, taught)


def _column(name: str, samples: Sequence[Sample]) -> np.ndarray | None:
    """Return a column of all samples, [tokens] or [tokens, k]; None if a sample has none."""
    parts = [getattr(sample, name) for sample in samples]
    return None if any(part is None for part in parts) else np.concatenate(parts)


def _with_columns(samples: list[Sample], columns: dict[str, np.ndarray]) -> list[Sample]:
    """Return the samples with their parts of the columns of `_column`."""
    cuts = np.cumsum([sample.num_sampled_tokens for sample in samples])[:-1]
    for name, column in columns.items():
        parts = np.split(column, cuts)
        samples = [replace(s, **{name: part}) for s, part in zip(samples, parts, strict=True)]
    return samples


def _joined(name: str, parts: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return arrays as one flat array with their sizes; ABSENT marks a missing array."""
    present = [part for part in parts if part is not None]
    flat = np.concatenate([np.zeros(0, dtype=np.float32), *present])
    sizes = np.array([ABSENT if part is None else len(part) for part in parts])
    return {name: flat, f"{name}_sizes": sizes}


def _split_array(flat: np.ndarray, sizes: np.ndarray) -> list[np.ndarray | None]:
    parts = np.split(flat, np.cumsum(np.maximum(sizes, 0))[:-1])
    return [None if size == ABSENT else part for part, size in zip(parts, sizes, strict=True)]
