"""The command `set` of a run's owner: change live keys while the run works."""

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.config.keys import dotted
from common.config.run_config import RunConfig
from common.errors import ConfigError, LongstrideError, WireError
from common.repository import ROOT
from common.store.run_dir import RunDir
from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand

if TYPE_CHECKING:
    from common.wire.messages import ConfigChanged, ConfigRequest
    from common.wire.sockets import FollowingDealer

CHOICE = ("run.name", "run.dir")  # Keys that choose the run.
CONNECT_S = 5.0
ANSWER_S = 20.0  # Seconds without any answer after which the scheduler counts as lost.
REPEAT_S = 5.0  # Seconds between two sends of the same request: the scheduler may restart.
POLL_S = 0.05


def set_keys(request: ParsedCommand, *, answer_s: float = ANSWER_S) -> int:
    """Change the keys of the request in a running run; return the exit code.

    It returns once the change is in force for new groups, at the next step boundary.

    Raises:
        ConfigError: a key is not live, a value is wrong, or the run does not work.
        LongstrideError: the scheduler stopped answering.
    """
    from common.config.live import text_at
    from common.wire.messages import ConfigRequest

    run_words = [word for word in request.overrides if dotted(word.partition("=")[0]) in CHOICE]
    wanted = [word for word in request.overrides if word not in run_words]
    cfg = requested.load_joined(replace(request, overrides=run_words))
    new = _new_values(cfg, wanted)
    run_dir = RunDir(root=ROOT / cfg.run.dir / cfg.run.name)
    if not new:
        print(f"{run_dir.root}: the run has these values already")
        return 0
    old = {key: text_at(cfg, key) for key in new}
    message = ConfigRequest(request=secrets.token_hex(8), old=old, new=new)
    try:
        done = _ask(run_dir, message, answer_s=answer_s)
    except WireError as error:  # The run's code is older, and has no live keys.
        raise ConfigError(f"set: {error}") from error
    shown = ", ".join(f"{key} {old[key]} -> {value}" for key, value in new.items())
    print(f"{run_dir.root}: change {done.number} is in force after step {done.step}: {shown}")
    return 0


def _new_values(cfg: RunConfig, wanted: list[str]) -> dict[str, str]:
    """Return the keys that change, with their new values. Raises: ConfigError."""
    from common.config.live import check_effect, check_live, text_at, with_values

    if not wanted:
        raise ConfigError("set: give a live key, such as: run.py set run.name=a learner.lr=1e-5")
    for word in wanted:
        key, equals, _ = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: a change is key=value, like learner.lr=1e-5")
        check_live(key)
    values = dict(word.split("=", 1) for word in wanted)
    changed = with_values(cfg, values)
    for key in values:
        check_effect(changed, key)
    keys = [dotted(key) for key in values]
    return {
        key: text_at(changed, key) for key in keys if text_at(changed, key) != text_at(cfg, key)
    }


def _ask(run_dir: RunDir, message: "ConfigRequest", *, answer_s: float) -> "ConfigChanged":
    """Send a request, and wait until the change is in force; return the scheduler's answer."""
    import zmq

    from common.wire.security import load_keys
    from common.wire.sockets import FollowingDealer

    where = f"{run_dir.root}: is the run working?"
    if not run_dir.keys.is_dir() or run_dir.find_address("scheduler") is None:
        raise ConfigError(f"{where} It has no scheduler. `train` accepts other values at its start")
    context: Any = zmq.Context()
    dealer = FollowingDealer(run_dir, "scheduler", load_keys(run_dir.keys), context=context)
    try:
        dealer.connect(timeout_s=CONNECT_S)
        return _wait(dealer, message, where=where, answer_s=answer_s)
    finally:
        dealer.close(linger_s=0.0)
        context.term()


def _wait(
    dealer: "FollowingDealer", message: "ConfigRequest", *, where: str, answer_s: float
) -> "ConfigChanged":
    """Send a request again and again until it is answered for good."""
    from common.wire.messages import ConfigChanged, Rejected

    send_at = 0.0
    is_accepted = False
    heard_at = time.monotonic()
    while time.monotonic() - heard_at < answer_s:
        if dealer.follow() or time.monotonic() >= send_at:
            dealer.send(message)
            send_at = time.monotonic() + REPEAT_S
        for answer in dealer.take_all():
            heard_at = time.monotonic()
            if isinstance(answer, Rejected):
                raise ConfigError(answer.reason)
            if isinstance(answer, ConfigChanged) and answer.number >= 0:
                return answer
            if not is_accepted:
                is_accepted = True
                print(f"accepted after step {answer.step}; waiting for the next step boundary")
        time.sleep(POLL_S)
    raise LongstrideError(f"{where} The scheduler sent no answer within {answer_s:g} s")


def run(request: ParsedCommand) -> int:
    return set_keys(request)


COMMAND = Command(
    run=run,
    text="change live keys of a run while it works, such as its learning rate or its horizon",
    sections="run",
    example="run.name=a learner.lr=1e-5 horizon.stages=[10,20]",
)
