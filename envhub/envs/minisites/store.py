"""Sessions of the sites: each session has its own copy of the seeded databases."""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from envhub.envs.minisites.gitlab.seed import fill_gitlab
from envhub.envs.minisites.maps.seed import fill_maps
from envhub.envs.minisites.reddit.seed import fill_reddit
from envhub.envs.minisites.shop.seed import fill_shop

DEMO_SEED = 0
MAX_MASTERS = 32  # Maximum number of cached seeded databases, about 0.3 MB each.
FILLERS: Mapping[str, Callable[[sqlite3.Connection, int], None]] = {
    "gitlab": fill_gitlab,
    "maps": fill_maps,
    "reddit": fill_reddit,
    "shop": fill_shop,
}


class UnknownSession(LookupError):
    """The session does not exist: it was never reset, or has been dropped."""


@dataclass(slots=True, kw_only=True)
class VisitorSession:
    """The state of one visitor. A database is copied when a page first needs it."""

    seed: int
    databases: dict[str, sqlite3.Connection] = field(default_factory=dict)
    notice: str = ""  # Notice shown once, on the next page.

    def database(self, name: str) -> sqlite3.Connection:
        """Return this session's own copy of a database."""
        if name not in self.databases:
            self.databases[name] = copy_of(name, self.seed)
        return self.databases[name]

    def close(self) -> None:
        """Close the copies."""
        for database in self.databases.values():
            database.close()
        self.databases.clear()


class Store:
    """All sessions by id; visitors without an id share the demo session."""

    def __init__(self) -> None:
        self._sessions: dict[str, VisitorSession] = {}
        self._demo = VisitorSession(seed=DEMO_SEED)

    @property
    def num_sessions(self) -> int:
        """Return the number of sessions without the demo."""
        return len(self._sessions)

    def reset(self, session_id: str, seed: int) -> None:
        """Create a session, or replace it, with the world of a seed."""
        self.drop(session_id)
        self._sessions[session_id] = VisitorSession(seed=seed)

    def drop(self, session_id: str) -> bool:
        """Delete a session; return whether it existed."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()
        return session is not None

    def session(self, session_id: str | None) -> VisitorSession:
        """Return a session, or the demo for None.

        Raises: UnknownSession: never reset, or dropped.
        """
        if session_id is None:
            return self._demo
        if session_id not in self._sessions:
            raise UnknownSession(session_id)
        return self._sessions[session_id]

    def close(self) -> None:
        """Close all sessions."""
        for session_id in list(self._sessions):
            self.drop(session_id)
        self._demo.close()


@lru_cache(maxsize=MAX_MASTERS)
def master(name: str, seed: int) -> sqlite3.Connection:
    """Return the seeded database itself, for reading and copying only."""
    database = _connect()
    FILLERS[name](database, seed)
    database.execute("PRAGMA query_only = ON")
    return database


def copy_of(name: str, seed: int) -> sqlite3.Connection:
    """Return a new writable copy of a seeded database."""
    database = _connect()
    master(name, seed).backup(database)
    return database


def _connect() -> sqlite3.Connection:
    """Return a new connection to a database in memory."""
    # The server can run in another thread than the creator of the masters. Only one thread uses a
    # connection at a time.
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    database.row_factory = sqlite3.Row
    return database
