"""The messages of a node that joins without the run's directory: node <-> scheduler.

Example: a node sends a JoinRequest and gets an Enrolment, asks for each file part by part, starts
its role, says hello, and is told by Directory messages where the other roles are.
"""

from dataclasses import dataclass, field

from common.wire.access.bounds import Count, Id, LongText, Names, Seconds, Version

NAME_IN_USE = "somebody who is there has the name"  # a refusal that passes


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """First message of a joining node: may I, and what must I know?"""

    role: Id  # "actor" | "envhub"
    product: Id  # version of the node's code
    is_remote: bool = False  # from another machine than the scheduler's
    has_model: bool = False  # it has a model of its own and needs no files
    name: Id = ""  # that the node will speak by, and nobody else
    public_key: Id = ""  # of the pair that it has made for that, Z85


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file that a node may ask for."""

    name: Id  # without any folder
    num_bytes: Count
    sha256: Id  # hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """Answer to JoinRequest."""

    run_name: Id
    config: LongText  # YAML of the sections that the role needs
    files: list[SharedFile] = field(default_factory=list[SharedFile])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """Node -> scheduler: one part of a file of the enrolment."""

    name: Id
    offset_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Answer to FileRequest; the last part ends where the file does."""

    name: Id
    offset_bytes: Count
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Where an environment hub is reached, and what it serves."""

    url: str
    token: str = field(repr=False)  # "": it asks for none
    envs: Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Scheduler -> actor: where the other roles are reached. Sent whenever it is another one."""

    number: Version  # of this content; a heartbeat says which one its sender knows
    learner: str  # takes trajectories; "": none has said hello
    weights: str  # offers versions; "" as well
    hubs: list[HubPlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUse:
    """What a hub has in use now."""

    num_sessions: Count = 0
    max_sessions: Count = 0  # at a time, of all environments; 0: not known
    rss_bytes: Count = 0  # with all that it started
    cpu_s: Seconds = 0.0  # of processors, likewise, since its start


@dataclass(frozen=True, slots=True, kw_only=True)
class HubHello:
    """Hub -> scheduler, with every heartbeat: it is here, and serves."""

    name: Id
    incarnation: Id  # random per process start
    place: HubPlace
    refused: dict[str, int] = field(default_factory=dict[str, int], compare=False)  # requests and
    # connections since then, by "address/reason"
    node: Id = ""  # its machine, as `node_name` says
    use: HubUse = field(default=HubUse(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGoodbye:
    """Hub -> scheduler: send nobody any more."""

    name: Id
    incarnation: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class HubNoted:
    """Answer to HubHello, and sent once more when the run is over."""

    is_finished: bool  # a hub that joined leaves
