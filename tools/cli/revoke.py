"""The command `revoke` of a run's owner."""

from collections.abc import Callable
from dataclasses import replace

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.access.identities import revoke
from tools.cli.command_line import ParsedCommand


def revoke_key(
    request: ParsedCommand,
    *,
    load: Callable[[ParsedCommand], RunConfig],
    echo: Callable[[str], object],
) -> int:
    """Revoke the key of the member that the request names; return the exit code.

    Raises: ConfigError: the request names no member, or a member without a key.
    """
    names = [word for word in request.overrides if "=" not in word]
    if len(names) != 1:
        raise ConfigError("revoke: give one name, such as: run.py revoke run.name=a actor-3")
    overrides = [word for word in request.overrides if "=" in word]
    cfg = load(replace(request, overrides=overrides))
    run_dir = RunDir(root=ROOT / cfg.run.dir / cfg.run.name)
    taken = revoke(run_dir.keys, names[0])
    echo(f"{run_dir.root}: the key of {taken.name} ({taken.role}) is revoked")
    return 0
