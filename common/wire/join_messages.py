"""Messages of a node that joins a run without access to its directory: node <-> scheduler.

Example: a node sends a JoinRequest and receives an Enrolment. It requests each file in parts and
starts its role. The role sends a hello, and Directory messages contain the other roles' addresses.
"""

from dataclasses import dataclass, field

from common.wire.access.bounds import Count, Id, LongText, Names, Seconds, Version

NAME_IN_USE = "another process of the run uses this name"  # A temporary refusal: the node retries.


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """First message of a joining node: a request for a place in the run and its configuration."""

    role: Id  # "actor" | "envhub" | "learner"
    product: Id  # Version of the node's code.
    is_remote: bool = False  # The node is on another machine than the scheduler.
    has_model: bool = False  # The node has a copy of the model and needs no files.
    name: Id = ""  # Unique name under which the node will send its messages.
    public_key: Id = ""  # Public key that the node has created for this name, Z85.
    commit: Id = ""  # Name of the node's code from `common.repository.code_name`.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file that a joining node may request."""

    name: Id  # File name without a folder.
    num_bytes: Count
    sha256: Id  # hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """Answer to JoinRequest."""

    run_name: Id
    config: LongText  # YAML of the configuration sections that the role needs.
    files: list[SharedFile] = field(default_factory=list[SharedFile])
    # Keys with their default. A node ignores those that its code does not have.
    defaults: Names = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """Node -> scheduler: request for one part of a file of the enrolment."""

    name: Id
    offset_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Answer to FileRequest. The last part ends at the end of the file."""

    name: Id
    offset_bytes: Count
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Address of an environment hub, and its environments."""

    url: str
    token: str = field(repr=False)  # "": the hub requires none.
    envs: Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Scheduler -> actor: addresses of the learner and the hubs. Sent after every change."""

    number: Version  # Number of this content. A heartbeat carries the sender's current number.
    learner: str  # Address for trajectories; "": no learner is registered.
    weights: str  # Address of the learner's weight plane; "": no learner is registered.
    hubs: list[HubPlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUse:
    """Current resource use of a hub."""

    num_sessions: Count = 0
    max_sessions: Count = 0  # Maximum number of concurrent sessions; 0: unknown.
    rss_bytes: Count = 0  # Resident memory of the hub and its child processes.
    cpu_s: Seconds = 0.0  # CPU time of the hub and its child processes since its start.


@dataclass(frozen=True, slots=True, kw_only=True)
class HubHello:
    """Hub -> scheduler, with every heartbeat: registers the hub and its address."""

    name: Id
    incarnation: Id  # Random per process start.
    place: HubPlace
    # Refused requests and connections since the start of the process, by "address/reason".
    refused: dict[str, int] = field(default_factory=dict[str, int], compare=False)
    node: Id = ""  # Name of the machine from `common.wire.addresses.node_name`.
    use: HubUse = field(default=HubUse(), compare=False)
    # Environments that wait for a service, such as a judge, with the reasons.
    paused: dict[str, str] = field(default_factory=dict[str, str], compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGoodbye:
    """Hub -> scheduler: the hub shuts down and takes no further sessions."""

    name: Id
    incarnation: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class HubNoted:
    """Answer to HubHello. The scheduler sends it once more when the run is over."""

    is_finished: bool  # The run is over, and a hub that joined it exits.
