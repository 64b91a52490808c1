"""Who may speak as whom: each actor and each hub has a key pair of its own, bound to its name.

`keys/peers.jsonl` lists their public halves, one line for each key given out or taken back; the
last line of a name counts. Every listener of the run reads it as it grows.
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
from common.store.run_dir import write_atomically

logger = logging.getLogger(__name__)

PEERS = "peers.jsonl"
MAX_PEERS = 100_000  # a run that has given out so many keys gives out no more
MAX_NAME_CHARS = 200
MAX_LINES_PER_NAME, LINE_BYTES = 3, 160  # on average; beyond, the last line of each name is kept
RESERVED = ("run", "node", "stranger", "learner", "scheduler")  # names begin otherwise
RUN, NODE = "run", "node"  # roles of the two pairs that have no name of their own
NAME_FIELD = {  # which field of a message says who speaks, so what it must be
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
}
RIGHTS = {  # what may be said with a key of each role; "run", the centre's own, may say anything
    "actor": frozenset(each for each in NAME_FIELD if not each.startswith("Hub"))
    | {"StoreRequest", "FileRequest"},
    "envhub": frozenset({"HubHello", "HubGoodbye", "JoinRequest", "FileRequest"}),
    NODE: frozenset({"JoinRequest", "FileRequest"}),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose key it is."""

    name: str
    role: str  # "actor" | "envhub" | RUN | NODE
    public: str  # Z85
    is_revoked: bool = False

    def why_not(self, message: object) -> str:
        """Return why its holder may not say this, "" if it may."""
        if self.is_revoked:
            return f"the key of {self.name} is revoked"
        if self.role == RUN:
            return ""
        kind = type(message).__name__
        if kind not in RIGHTS[self.role]:
            return f"the key of {self.name} ({self.role}) does not allow this {kind}"
        field = NAME_FIELD.get(kind) if self.role != NODE else None  # who asks for a key has none
        if field is not None and getattr(message, field) != self.name:
            return f"the key of {self.name} lets nobody speak as another"
        role = getattr(message, "role", self.role) if field else self.role
        return "" if role == self.role else f"the key of {self.name} is an {self.role}'s"


class Identities:
    """The named keys of a run, as its file says now. For one thread."""

    def __init__(self, folder: Path | None, *own: Identity) -> None:
        """Know the keys without a line in `folder` as well; None: there are no others."""
        self._path = folder / PEERS if folder is not None else None
        self._own = {each.public: each for each in own if each.public}
        self._by_name: dict[str, Identity] = {}
        self._by_public = dict(self._own)
        self._offset = self._inode = 0

    def find(self, public: str) -> Identity | None:
        """Return whose key it is; None: nobody's, or one that another of its name replaced."""
        return self._by_public.get(public)

    @property
    def names(self) -> list[str]:
        """Of all who were ever given a key."""
        return list(self._by_name)

    def all(self) -> list[Identity]:
        """Return the last word on each name."""
        return list(self._by_name.values())

    def named(self, name: str) -> Identity | None:
        """Return who has a name."""
        return self._by_name.get(name)

    def refresh(self) -> bool:
        """Read what was added to the file since, all of one that was rewritten; True if any."""
        if self._path is None:
            return False
        try:
            found = self._path.stat()
            if found.st_ino == self._inode and found.st_size <= self._offset:
                return False
            with self._path.open("rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                    self._inode, self._offset = inode, 0
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
                logger.error("unreadable line skipped file=%s", self._path)
        return bool(whole)

    def _note(self, identity: Identity) -> None:
        before = self._by_name.get(identity.name)
        if before is not None:
            self._by_public.pop(before.public, None)
        self._by_name[identity.name] = self._by_public[identity.public] = identity
        self._by_public |= self._own  # no line takes their place, but revoking one takes it back
        if identity.public in self._own:
            self._own[identity.public] = self._by_public[identity.public] = identity

    def __len__(self) -> int:
        return len(self._by_name)


def add_identity(folder: Path, identity: Identity) -> None:
    """Give a key out, or take it back. Raises: ConfigError: no such name, or too many."""
    is_ours = identity.name.partition("-")[0] in RESERVED
    if identity.role not in RIGHTS or is_ours or not 0 < len(identity.name) <= MAX_NAME_CHARS:
        raise ConfigError(f"no key for {identity.name[:80]!r} ({identity.role[:20]!r})")
    with locked(folder):
        known = Identities(folder)
        known.refresh()
        if len(known) >= MAX_PEERS:
            raise ConfigError(f"{folder / PEERS}: {len(known)} keys are given out, and no more")
        _append(folder / PEERS, identity)
        if (folder / PEERS).stat().st_size > MAX_LINES_PER_NAME * LINE_BYTES * (len(known) + 100):
            known.refresh()
            lines = (json.dumps(asdict(each)) + "\n" for each in known.all())
            write_atomically(folder / PEERS, "".join(lines), mode=0o600)


def revoke(folder: Path, name: str) -> Identity:
    """Take a name's key back; "node" is the key of joining itself.

    Raises: ConfigError: nobody has that name; names those who do.
    """
    known = Identities(folder)
    known.refresh()
    found = known.named(name)
    if found is None and name == NODE and (folder / "node_public").exists():
        found = Identity(NODE, NODE, (folder / "node_public").read_text(encoding="utf-8").strip())
    if found is None:
        names = ", ".join([NODE, *sorted(known.names)][:20])
        raise ConfigError(f"{name}: no key of that name in {folder}; there are: {names}")
    taken = Identity(found.name, found.role, found.public, is_revoked=True)
    with locked(folder):
        _append(folder / PEERS, taken)
    return taken


def _append(path: Path, identity: Identity) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, (json.dumps(asdict(identity)) + "\n").encode())
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keep other processes from writing keys of a folder meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
