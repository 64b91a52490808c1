"""Access rights by key: each actor, hub and learner node has its own key pair for its name.

`keys/peers.jsonl` lists the public keys. Each issued or revoked key adds one line, and the last
line of a name is valid. Every listener of the run polls the file for new lines.
"""

import fcntl
import json
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.ids import process_of
from common.store.run_dir import write_atomically
from common.text import is_file_name

logger = logging.getLogger(__name__)

PEERS = "peers.jsonl"
MAX_PEERS = 100_000  # Maximum number of keys that a run issues.
MAX_NAME_CHARS = 200
# Averages above which the file is compacted.
MAX_LINES_PER_NAME = 3
LINE_BYTES = 160
RESERVED = ("run", "node", "stranger", "learner", "scheduler")  # Prefixes that names must not have.
RANKS = "ranks"  # Prefix of the names of the learner's further nodes, and of no others.
# Roles of the two key pairs without a name of their own.
RUN = "run"
NODE = "node"
NAME_FIELD = {  # The field of each message type that must hold the sender's name.
    "Hello": "name",
    "Goodbye": "name",
    "Heartbeat": "name",
    "LeaseRequest": "actor",
    "Trajectory": "actor",
    "WeightsJoin": "actor",
    "WeightsLeave": "actor",
    "WeightsReady": "actor",
    "WeightsLoaded": "actor",
    "CanaryScores": "actor",
    "HubHello": "name",
    "HubGoodbye": "name",
    "JoinRequest": "name",
    "RanksRequest": "name",
    "RankBeat": "name",
}
RANK_MESSAGES = frozenset({"RanksRequest", "RankBeat", "RankFile"})
# Message types that a key of each role allows. The key of scheduler and learner allows all types.
RIGHTS = {
    "actor": frozenset(each for each in NAME_FIELD if not each.startswith(("Hub", "Rank")))
    | {"StoreRequest", "FileRequest"},
    "envhub": frozenset({"HubHello", "HubGoodbye", "JoinRequest", "FileRequest"}),
    "learner": RANK_MESSAGES | {"JoinRequest"},
    NODE: frozenset({"JoinRequest", "FileRequest"}),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner of a key: its name and role."""

    name: str
    role: str  # "actor" | "envhub" | "learner" (ranks on another node) | RUN | NODE
    public: str  # Z85
    is_revoked: bool = False

    def why_not(self, message: object) -> str:
        """Return why this key does not allow the message, "" if it does."""
        if self.is_revoked:
            return f"the key of {self.name} is revoked"
        if self.role == RUN:
            return ""
        kind = type(message).__name__
        if kind not in RIGHTS[self.role]:
            return f"the key of {self.name} ({self.role}) does not allow this {kind}"
        # A joining node requests a key for its name, so the node key is bound to no name.
        field = NAME_FIELD.get(kind) if self.role != NODE else None
        if field is not None and not self._may_use(getattr(message, field)):
            return f"the key of {self.name} is not valid for messages under another name"
        role = getattr(message, "role", self.role) if field else self.role
        return "" if role == self.role else f"the key of {self.name} is for the role {self.role}"

    def _may_use(self, name: str) -> bool:
        """Return whether a message may have this name: the owner's, or that of its engine."""
        return name == self.name or (self.role == "actor" and process_of(name) == self.name)


class Identities:
    """The named keys of a run, read from its file. Use from one thread."""

    def __init__(self, folder: Path | None, *identities: Identity) -> None:
        """Hold the keys of `identities`, and those listed in `folder` unless it is None."""
        self._path = folder / PEERS if folder is not None else None
        self._own = {identity.public: identity for identity in identities if identity.public}
        self._by_name: dict[str, Identity] = {}
        self._by_public = dict(self._own)
        self._offset = self._inode = 0

    def find(self, public: str) -> Identity | None:
        """Return the owner of a key, None if the key is unknown or was replaced by a newer one."""
        return self._by_public.get(public)

    @property
    def names(self) -> list[str]:
        """Names of all keys that were ever issued."""
        return list(self._by_name)

    def all(self) -> list[Identity]:
        """Return the latest identity of each name."""
        return list(self._by_name.values())

    def named(self, name: str) -> Identity | None:
        """Return the latest identity of a name, None if no key has it."""
        return self._by_name.get(name)

    def refresh(self) -> bool:
        """Read new lines of the file, or all lines after a compaction; True if there are any."""
        if self._path is None:
            return False
        try:
            status = self._path.stat()
            if status.st_ino == self._inode and status.st_size <= self._offset:
                return False
            with self._path.open("rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                    self._inode = inode
                    self._offset = 0
                    self._by_name, self._by_public = {}, dict(self._own)
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                fields: dict[str, Any] = json.loads(line)
                self._note(Identity(**fields))
            except (ValueError, TypeError):
                logger.error("skipped invalid line file=%s", self._path)
        return bool(whole)

    def _note(self, identity: Identity) -> None:
        """Register an identity as the current one of its name."""
        before = self._by_name.get(identity.name)
        if before is not None:
            self._by_public.pop(before.public, None)
        self._by_name[identity.name] = self._by_public[identity.public] = identity
        self._by_public |= self._own  # A line can revoke one of these keys, but not replace it.
        if identity.public in self._own:
            self._own[identity.public] = self._by_public[identity.public] = identity

    def __len__(self) -> int:
        return len(self._by_name)


def add_identity(folder: Path, identity: Identity) -> None:
    """Append a key to the list. Raises: ConfigError: an invalid name or role, or too many keys."""
    prefix = identity.name.partition("-")[0]
    is_ours = prefix in RESERVED or (prefix == RANKS) != (identity.role == "learner")
    is_ours = is_ours or process_of(identity.name) != identity.name  # Its process has the key.
    is_name = is_file_name(identity.name) and len(identity.name) <= MAX_NAME_CHARS
    if identity.role not in RIGHTS or is_ours or not is_name:
        raise ConfigError(
            f"cannot issue a key for {identity.name[:80]!r} ({identity.role[:20]!r}): the role or"
            " the name is not allowed"
        )
    with locked(folder):
        identities = Identities(folder)
        identities.refresh()
        if len(identities) >= MAX_PEERS:
            raise ConfigError(
                f"{folder / PEERS}: all {MAX_PEERS} keys are issued; a new run has a new list"
            )
        _append(folder / PEERS, identity)
        if (folder / PEERS).stat().st_size > MAX_LINES_PER_NAME * LINE_BYTES * (
            len(identities) + 100
        ):
            identities.refresh()
            lines = (json.dumps(asdict(each)) + "\n" for each in identities.all())
            write_atomically(folder / PEERS, "".join(lines), mode=0o600)


def revoke(folder: Path, name: str) -> Identity:
    """Revoke the key of a name. The name "node" is the shared key of joining nodes.

    Raises: ConfigError: no key has this name. The error lists the known names.
    """
    identities = Identities(folder)
    identities.refresh()
    identity = identities.named(name)
    if identity is None and name == NODE and (folder / "node_public").exists():
        identity = Identity(
            NODE, NODE, (folder / "node_public").read_text(encoding="utf-8").strip()
        )
    if identity is None:
        names = ", ".join([NODE, *sorted(identities.names)][:20])
        raise ConfigError(f"{name}: no key in {folder} has this name; known names: {names}")
    taken = Identity(identity.name, identity.role, identity.public, is_revoked=True)
    with locked(folder):
        _append(folder / PEERS, taken)
    return taken


def _append(path: Path, identity: Identity) -> None:
    """Append one line to the list of keys."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, (json.dumps(asdict(identity)) + "\n").encode())
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold an exclusive lock on the keys of a folder, against writes of other processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
