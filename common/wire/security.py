"""Keys of a run: three CURVE key pairs and a token for requests to hubs.

One pair belongs to the servers, one to scheduler and learner as clients, one to joining nodes.
The files have mode 0600. The scheduler and the learner read all of them. Each actor and each hub
has its own key pair (`access.identities`). A role on the run's disk creates its pair itself. A
node elsewhere requests one with the join key, which allows nothing else.
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
from common.wire.access.identities import (
    NODE,
    RANKS,
    RUN,
    Identities,
    Identity,
    add_identity,
    locked,
)

_PAIRS = ("server", "client", "node")
_FILES = (*(f"{pair}_{half}" for pair in _PAIRS for half in ("public", "secret")), "hub_token")
JOIN_KEY = "join.key"
MAX_KEY_FILE_BYTES = 10_000
NODE_ROLES = ("actor", "envhub")  # Roles that a node with the join key may request.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """Keys of one role for the sockets of its run. CURVE keys are Z85 text of 40 characters."""

    server_public: str
    server_secret: str = ""  # "": this process cannot listen.
    client_public: str  # Key pair with which this process authenticates itself.
    client_secret: str
    node_public: str = ""  # Key pair of joining nodes, which a listener accepts as well.
    node_secret: str = ""
    hub_token: str
    folder: str = ""  # Folder with the public keys of actors and hubs; "": there is none.

    def known(self) -> Identities:
        """Return the keys that a listener accepts."""
        run = Identity(RUN, RUN, self.client_public)
        node = Identity(NODE, NODE, self.node_public)
        return Identities(Path(self.folder) if self.folder else None, run, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinKey:
    """Content of the key file of a joining node."""

    format: Literal[1]
    run: str
    roles: list[str]  # Roles that a node with this key may have.
    server_public: str
    client_public: str
    client_secret: str
    name: str = ""  # Owner of the key; "": the shared join key, with which a node requests its own.

    def as_keys(self) -> RunKeys:
        """Return the keys with which the node connects."""
        return RunKeys(
            server_public=self.server_public,
            client_public=self.client_public,
            client_secret=self.client_secret,
            hub_token="",
        )


def create_keys(folder: Path) -> RunKeys:
    """Write new keys to `folder` unless it has keys; return the keys.

    Raises: ConfigError: some key files exist and others are missing. The error lists the missing
        ones. New files in their place would not match the keys that running roles use.
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
    """Return the keys of a run's scheduler and learner.

    Raises: ConfigError: key files are missing. The error lists them.
    """
    missing = [str(folder / name) for name in _FILES if not (folder / name).exists()]
    if missing:
        raise ConfigError(
            f"keys are missing: {', '.join(missing)}. Restore them from a copy, or begin another"
            " run. A role on another machine joins with --join and --key"
        )
    texts = {name: (folder / name).read_text(encoding="utf-8").strip() for name in _FILES}
    return RunKeys(**texts, folder=str(folder.resolve()))


def own_keys(folder: Path, *, role: str, name: str) -> RunKeys:
    """Return new keys, valid for one name only, for an actor or a hub on the run's disk.

    Raises: ConfigError: key files of the run are missing. The error lists them.
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
    """Write the shared key file of joining nodes with mode 0600; return its path."""
    key = _join_key(keys, run_name, list(NODE_ROLES), keys.node_public, keys.node_secret)
    text = json.dumps(asdict(key), indent=2) + "\n"
    path = folder / JOIN_KEY
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_private(path, text)
    return path


def issue_join_key(folder: Path, *, run_name: str, role: str, name: str) -> str:
    """Return the text of a new key file for the one process with this name."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    add_identity(folder, Identity(name, role, public))
    key = _join_key(load_keys(folder), run_name, [role], public, secret)
    return json.dumps(asdict(replace(key, name=name)), indent=2) + "\n"


def rank_node(number: int) -> str:
    """Return the name of a further node of the learner; rank 0's node has the number 0."""
    return f"{RANKS}-{number}"


def write_rank_keys(folder: Path, *, run_name: str, num_nodes: int) -> list[Path]:
    """Write one key file for each further node of the learner; return their paths.

    A key file that exists stays valid: the node may join again after a restart of the run.
    """
    paths: list[Path] = []
    for node in range(1, num_nodes):
        name = rank_node(node)
        path = folder / f"{name}.key"
        if not path.exists():
            text = issue_join_key(folder, run_name=run_name, role="learner", name=name)
            write_private(path, text)
        paths.append(path)
    return paths


def _join_key(keys: RunKeys, run_name: str, roles: list[str], public: str, secret: str) -> JoinKey:
    """Return the content of a key file."""
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

    Raises: ConfigError: the file is missing, readable by other users, invalid, or not for `role`.
    """
    from pydantic import TypeAdapter  # Only this function needs the slow import.

    remedy = f"copy runs/NAME/keys/{JOIN_KEY} from the run's node"
    try:
        is_private = not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        text = path.read_bytes()[:MAX_KEY_FILE_BYTES]
    except OSError as error:
        raise ConfigError(f"--key {path}: {error.strerror}; {remedy}") from error
    if not is_private:
        raise ConfigError(f"--key {path}: other users may read it; run chmod 600 {path}")
    try:
        key = TypeAdapter(JoinKey).validate_json(text, strict=True)
        if {len(k) for k in (key.server_public, key.client_public, key.client_secret)} != {40}:
            raise ValueError("a key must have 40 characters")
    except ValueError as error:  # The validation error of pydantic is a ValueError.
        raise ConfigError(f"--key {path}: not a key file of this version; {remedy}") from error
    if role not in key.roles:
        raise ConfigError(f"--key {path}: this key is for {', '.join(key.roles)}, not for {role}")
    return key


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, with mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
