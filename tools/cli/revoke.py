"""The command `revoke`: it revokes the key of a member of a run."""

from dataclasses import replace

from common.errors import ConfigError
from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    """Revoke the key of the member that the request names; return the exit code.

    Raises: ConfigError: the request names no member, or a member without a key.
    """
    from common.wire.access.identities import revoke

    names = [word for word in request.overrides if "=" not in word]
    if len(names) != 1:
        raise ConfigError("revoke: give one name, such as: run.py revoke run.name=a actor-3")
    overrides = [word for word in request.overrides if "=" in word]
    run_dir = requested.directory_of(requested.load_joined(replace(request, overrides=overrides)))
    revoked = revoke(run_dir.keys, names[0])
    print(f"{run_dir.root}: the key of {revoked.name} ({revoked.role}) is revoked")
    return 0


COMMAND = Command(
    run=run,
    text="revoke the key of an actor or a hub by its name; `node` stops new joins",
    sections="run",
    example="run.name=a actor-3",
)
