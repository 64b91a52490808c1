"""Keys of a run: a CURVE pair of its servers, one of the centre, one for joining, a token.

Files are 0600. The scheduler and the learner, the centre, read them all. Each actor and each hub
has a pair of its own (`access.identities`): on the run's disk it makes one itself, elsewhere it is
given one for the key file of joining, which lets its holder ask for that and no more.
"""

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import zmq

from common.errors import ConfigError
from common.wire.access.identities import NODE, RUN, Identities, Identity, add_identity, locked

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
    folder: str = ""  # where a listener finds the public keys of actors and hubs; "": nowhere

    def known(self) -> Identities:
        """Return whom a listener lets in."""
        run, node = Identity(RUN, RUN, self.client_public), Identity(NODE, NODE, self.node_public)
        return Identities(Path(self.folder) if self.folder else None, run, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinKey:
    """What the file of a joining node holds."""

    format: Literal[1]
    run: str
    roles: list[str]  # what its holder may be
    server_public: str
    client_public: str
    client_secret: str
    name: str = ""  # whose key it is; "": nobody's, it is for asking for one

    def as_keys(self) -> RunKeys:
        """Return what a role connects with."""
        return RunKeys(
            server_public=self.server_public,
            client_public=self.client_public,
            client_secret=self.client_secret,
            hub_token="",
        )


def create_keys(folder: Path) -> RunKeys:
    """Write keys below `folder` unless there are some; return the keys.

    Raises: ConfigError: some are there and one is missing, because a new one in its place would
        lock out whoever has the others; names it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder):
        if not any((folder / name).exists() for name in _FILES):
            for pair in _PAIRS:
                public, secret = zmq.curve_keypair()
                write_private(folder / f"{pair}_secret", secret.decode())
                write_private(folder / f"{pair}_public", public.decode())
            write_private(folder / "hub_token", secrets.token_urlsafe(32))
    return load_keys(folder)


def load_keys(folder: Path) -> RunKeys:
    """Return the keys of a run's centre.

    Raises: ConfigError: a key file is missing; names it. A role on another node joins.
    """
    missing = [str(folder / name) for name in _FILES if not (folder / name).exists()]
    if missing:
        raise ConfigError(
            f"keys missing: {', '.join(missing)}; put them back from a copy, or begin another run."
            " A role on another machine joins with --join and --key"
        )
    texts = {name: (folder / name).read_text(encoding="utf-8").strip() for name in _FILES}
    return RunKeys(**texts, folder=str(folder.resolve()))


def own_keys(folder: Path, *, role: str, name: str) -> RunKeys:
    """Return new keys for an actor or a hub on the run's disk, which let it speak as itself only.

    Raises: ConfigError: the run has no keys; names what is missing.
    """
    run = load_keys(folder)
    public, secret = (half.decode() for half in zmq.curve_keypair())
    add_identity(folder, Identity(name, role, public))
    return RunKeys(
        server_public=run.server_public,
        client_public=public,
        client_secret=secret,
        hub_token=run.hub_token if role == "envhub" else "",
    )


def write_join_key(folder: Path, keys: RunKeys, *, run_name: str) -> Path:
    """Write the key file of joining nodes, 0600; return where."""
    key = _join_key(keys, run_name, list(NODE_ROLES), keys.node_public, keys.node_secret)
    text = json.dumps(asdict(key), indent=2) + "\n"
    path = folder / JOIN_KEY
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_private(path, text)
    return path


def issue_join_key(folder: Path, *, run_name: str, role: str, name: str) -> str:
    """Return the text of a new key file that lets its holder be one actor or hub, by its name."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    add_identity(folder, Identity(name, role, public))
    key = _join_key(load_keys(folder), run_name, [role], public, secret)
    return json.dumps(asdict(replace(key, name=name)), indent=2) + "\n"


def _join_key(keys: RunKeys, run_name: str, roles: list[str], public: str, secret: str) -> JoinKey:
    return JoinKey(
        format=1,
        run=run_name,
        roles=roles,
        server_public=keys.server_public,
        client_public=public,
        client_secret=secret,
    )


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


def write_private(path: Path, text: str) -> None:
    """Replace a file that only its owner may read; a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
