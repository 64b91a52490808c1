"""Keys of a run: one CURVE server pair, one client pair, one bearer token. Files are 0600."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq

from common.errors import ConfigError

_FILES = ("server_public", "server_secret", "client_public", "client_secret", "hub_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """What a role needs to speak to the others of its run. Z85 text, 40 characters each."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    hub_token: str


def create_keys(folder: Path) -> RunKeys:
    """Write new keys below `folder` unless they exist; return the keys."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not all((folder / name).exists() for name in _FILES):
        pairs = [*zmq.curve_keypair(), *zmq.curve_keypair()]
        values = [*(key.decode() for key in pairs), secrets.token_urlsafe(32)]
        for name, value in zip(_FILES, values, strict=True):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(value)
    return load_keys(folder)


def load_keys(folder: Path) -> RunKeys:
    """Return the keys of a run.

    Raises: ConfigError: a key file is missing; names it. A role on another node needs a copy.
    """
    missing = [str(folder / name) for name in _FILES if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"keys missing: {', '.join(missing)}; copy keys/ from the run's node")
    return RunKeys(**{name: (folder / name).read_text().strip() for name in _FILES})
