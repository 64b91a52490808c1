"""Keys of a run: a CURVE pair of its servers, one of its roles, one of nodes that join, a token.

Files are 0600. A role on the run's own disk reads them all. A node that joins gets one file, with
what it needs to be let in and no more: it can neither listen in the run's name nor read what the
roles say to each other.
"""

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import zmq

from common.errors import ConfigError

_PAIRS = ("server", "client", "node")
_FILES = (*(f"{pair}_{half}" for pair in _PAIRS for half in ("public", "secret")), "hub_token")
JOIN_KEY = "join.key"
MAX_KEY_FILE_BYTES = 10_000
NODE_ROLES = ("actor", "envhub")  # what the node pair lets its holder be


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """What a role needs to speak to the others of its run. Z85 text, 40 characters each."""

    server_public: str
    server_secret: str = ""  # "": cannot listen
    client_public: str  # the pair by which this process is let in
    client_secret: str
    node_public: str = ""  # of the nodes that a listener lets in as well
    node_secret: str = ""
    hub_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinKey:
    """What the file of a joining node holds."""

    format: Literal[1]
    run: str
    roles: list[str]  # what its holder may be
    server_public: str
    client_public: str
    client_secret: str

    def as_keys(self) -> RunKeys:
        """Return what a role connects with."""
        return RunKeys(
            server_public=self.server_public,
            client_public=self.client_public,
            client_secret=self.client_secret,
            hub_token="",
        )


def create_keys(folder: Path) -> RunKeys:
    """Write new keys below `folder` unless they exist; return the keys."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for pair in _PAIRS:
        if not all((folder / f"{pair}_{half}").exists() for half in ("public", "secret")):
            public, secret = zmq.curve_keypair()
            _write_private(folder / f"{pair}_public", public.decode())
            _write_private(folder / f"{pair}_secret", secret.decode())
    if not (folder / "hub_token").exists():
        _write_private(folder / "hub_token", secrets.token_urlsafe(32))
    return load_keys(folder)


def load_keys(folder: Path) -> RunKeys:
    """Return the keys of a run.

    Raises: ConfigError: a key file is missing; names it. A role on another node needs a copy.
    """
    missing = [str(folder / name) for name in _FILES if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"keys missing: {', '.join(missing)}; copy keys/ from the run's node")
    return RunKeys(**{name: (folder / name).read_text().strip() for name in _FILES})


def write_join_key(folder: Path, keys: RunKeys, *, run_name: str) -> Path:
    """Write the key file of joining nodes, 0600; return where."""
    key = JoinKey(
        format=1,
        run=run_name,
        roles=list(NODE_ROLES),
        server_public=keys.server_public,
        client_public=keys.node_public,
        client_secret=keys.node_secret,
    )
    text = json.dumps(asdict(key), indent=2) + "\n"
    path = folder / JOIN_KEY
    if not path.exists() or path.read_text() != text:
        _write_private(path, text)
    return path


def read_join_key(path: Path, *, role: str) -> JoinKey:
    """Return the content of a joining node's key file.

    Raises: ConfigError: it is missing, others may read it, it is none, or not for this role.
    """
    from pydantic import TypeAdapter  # nobody else here needs it

    remedy = f"copy runs/NAME/keys/{JOIN_KEY} from the run's node"
    try:
        is_private = not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        text = path.read_bytes()[:MAX_KEY_FILE_BYTES]
    except OSError as error:
        raise ConfigError(f"--key {path}: {error.strerror}; {remedy}") from error
    if not is_private:
        raise ConfigError(f"--key {path}: others may read it; chmod 600 {path}")
    try:
        key = TypeAdapter(JoinKey).validate_json(text, strict=True)
        if {len(k) for k in (key.server_public, key.client_public, key.client_secret)} != {40}:
            raise ValueError("keys have 40 characters")
    except ValueError as error:  # pydantic's own error is one
        raise ConfigError(f"--key {path}: no key file of this version; {remedy}") from error
    if role not in key.roles:
        raise ConfigError(f"--key {path}: lets its holder be {', '.join(key.roles)}, not {role}")
    return key


def _write_private(path: Path, text: str) -> None:
    """Replace a file that only its owner may read; a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
