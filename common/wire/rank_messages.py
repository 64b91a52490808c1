"""Messages of a learner on several nodes: scheduler <-> nodes, rank 0 <-> the other nodes.

Example: rank 0 sends its place to the scheduler, and a node requests it there. The node's beats
reach rank 0, which answers with the rendezvous of the process group. The node starts its ranks.
They read the weights with file requests. Rank 0 sends each operation to the node as an order.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from common.wire.access.bounds import Count, Id, Names


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlace:
    """Rank 0 -> scheduler: its address for the other nodes. The scheduler sends it to them."""

    address: str  # "": no learner has registered yet.
    incarnation: Id  # Random per start of rank 0.
    is_finished: bool = False  # The run is over, and the node exits.


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRequest:
    """Node -> scheduler: request for the current place of rank 0."""

    name: Id


class NodeState(StrEnum):
    """State of the ranks of a node."""

    WAITING = "waiting"  # The node has no ranks yet.
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"  # A rank has ended.
    DISCONNECTED = "disconnected"  # The ranks have lost the connection to another node.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """Node -> rank 0: sign of life of a node, with the state of its ranks."""

    name: Id
    incarnation: Id  # The start of rank 0 that the node serves.
    process: Id  # Random per process of the node.
    node: Id  # Name of the machine from `common.wire.addresses.node_name`.
    host: Id  # The node's address on the interface that reaches rank 0.
    state: NodeState
    error: str = ""  # Why a rank ended.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """Answer to RankBeat: the rendezvous of the ranks."""

    incarnation: Id
    store_port: int
    store_public: Id  # Public key of the rendezvous store, Z85.
    store_secret: Id = field(repr=False)  # Secret key that admits a member to the store, Z85.
    group_key: Id = field(repr=False)  # Secret name of the process group in the store.
    checkpoint: str  # Folder of the checkpoint on rank 0's node; "": the run begins.
    probe: str  # File of the run directory whose content is `incarnation`.


class RankChannel(StrEnum):
    """Receiver of an order on a node."""

    TRAINING = "training"  # The main thread of each rank.
    WEIGHTS = "weights"  # The thread of each rank that serves weights to the publisher.
    STOP = "stop"  # The node: its ranks end.
    FINISH = "finish"  # The node: its ranks and its process end.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Rank 0 -> node: an operation of all ranks."""

    channel: RankChannel
    content: bytes = b""


class FileOp(StrEnum):
    """An operation on the files of rank 0's node."""

    LIST = "list"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """A rank of another node -> rank 0: an operation on a file of the weights or a checkpoint."""

    number: Count  # Number of the request on its connection.
    op: FileOp
    path: str
    offset_bytes: Count = 0
    num_bytes: Count = 0
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFileAnswer:
    """Answer to RankFile."""

    number: Count
    content: bytes = field(default=b"", repr=False)
    names: Names = field(default_factory=list[str])  # Paths below a folder, for LIST.
    error: str = ""
