"""Commands of a run: `train`, one role, and a role that joins from another machine."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.load import load_received, override_value
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.log import configure_logging
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import load_named
from tools.launch.base import RoleStarter
from tools.launch.observer import RunObserver

if TYPE_CHECKING:
    from common.join.enrol import Joined

# Opens the launcher of a run; it starts roles inside the context.
StartRoles = Callable[[RunConfig, RunDir], AbstractContextManager[RoleStarter]]
WITH_MODEL = ("learner", "actor")  # Roles that read the folder `model.path`.


def load_with_model(request: ParsedCommand) -> Any:
    """Return the config of a request, with folders in place of the names of models."""
    from tools.checks.hub_models import resolve_models

    cfg = load_named(request)
    return resolve_models(cfg, is_dry=request.is_dry, may_stand_in=request.is_dry)


def train(
    cfg: RunConfig, run_dir: RunDir, *, start_roles: StartRoles, observer: RunObserver
) -> int:
    """Start all roles and wait for the end of the run; return the exit code."""
    from common.config.live import with_changes
    from common.host.lock import hold_run
    from common.host.machine import gpus
    from common.store.run_start import dated, keep_tokenizer, prepare
    from common.wire.security import create_keys
    from tools.checks.preflight import check_devices
    from tools.checks.served.allocation import served_engines
    from tools.launch.roles import make_role_specs
    from tools.launch.served import make_engine_specs, with_engines
    from tools.launch.supervise import supervise

    is_here = cfg.launcher is Launcher.LOCAL
    assignment = check_devices(cfg) if is_here else None
    found = gpus() if is_here else ()
    served = served_engines(cfg, assignment=assignment, num_gpus=len(found))
    engines = make_engine_specs(cfg, run_dir, served, found=found)
    started = time.monotonic()
    with hold_run(run_dir.root, name=cfg.run.name), start_roles(cfg, run_dir) as starter:
        cfg = reachable_at(cfg, starter.host)
        prepare(cfg, run_dir)
        cfg = with_changes(cfg, run_dir, now_s=time.time())
        cfg = dated(cfg, run_dir, is_kept=True)
        for role in ("envhub", "scheduler", *(each.name for each in engines)):
            run_dir.forget_address(role)
        create_keys(run_dir.keys)
        save_config(cfg, run_dir.config)
        keep_tokenizer(cfg, run_dir)
        _link_latest(run_dir)
        specs = make_role_specs(
            cfg.run,
            run_dir,
            num_actors=cfg.actor.num_processes,
            has_hub=cfg.envhub.is_started and not cfg.envhub.url,
            num_rank_nodes=0 if is_here else cfg.learner.num_nodes - 1,
            assignment=assignment,
            found=found,
        )
        specs = with_engines(specs, engines, run_dir)
        ending, peak_bytes = supervise(cfg, run_dir, specs, starter, observer=observer)
    if 0 < ending.exit_code <= 128:  # No signal ended the run.
        print(f"error: {ending.reason}", file=sys.stderr)
    wall_s = time.monotonic() - started
    observer.conclude(ending, wall_s=wall_s, peak_memory_bytes=peak_bytes)
    return ending.exit_code


def reachable_at(cfg: RunConfig, host: str) -> RunConfig:
    """Return a config whose roles listen at `host`, except for explicitly set addresses."""
    from common.wire.addresses import is_loopback

    if is_loopback(host):
        return cfg
    own = {
        name: replace(section, host=host)
        for name in ("scheduler", "learner", "envhub")
        if is_loopback((section := getattr(cfg, name)).host)
    }
    return replace(cfg, **own)


def on_loopback(cfg: RunConfig) -> RunConfig:
    """Return a config whose roles listen on the loopback address that this machine supports.

    It replaces 127.0.0.1 by ::1 on a machine without IPv4, and the reverse without IPv6.
    """
    from common.host.loopback import IPV4, IPV6, can_bind, loopback

    own = {
        name: replace(section, host=loopback())
        for name in ("scheduler", "learner", "envhub")
        if (host := (section := getattr(cfg, name)).host) in (IPV4, IPV6) and not can_bind(host)
    }
    return replace(cfg, **own) if own else cfg


def _link_latest(run_dir: RunDir) -> None:
    """Make `latest` beside the run a link to it."""
    latest = run_dir.root.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(run_dir.root.name)


def be_role(
    name: str, run: Callable[[RunConfig, RunDir], None], cfg: RunConfig, run_dir: RunDir
) -> int:
    """Run one role in this process until it ends; return the exit code.

    Raises: ConfigError, NotStarted: the role failed before it began to work, see `StartGuard`.
    """
    from common.formats.chat_template import fix_prompts
    from common.stall.beacon import has_begun
    from common.store.run_start import dated
    from common.wire.security import create_keys
    from tools.checks.preflight import check_model
    from tools.launch.start_guard import StartGuard

    configure_logging(name, cfg.log.level)
    if name in WITH_MODEL:
        check_model(cfg.model.path)
    if name == "scheduler":  # It begins a run, and the other roles join it.
        create_keys(run_dir.keys)
    if not run_dir.config.exists():
        cfg = dated(cfg, run_dir, is_kept=True)
        save_config(cfg, run_dir.config)
    fix_prompts(cfg.model)
    with StartGuard(run_dir.root, has_begun=has_begun):
        run(cfg, run_dir)
    return 0


def join_run(request: ParsedCommand, run: Callable[[RunConfig, "Joined"], None]) -> int:
    """Run a role of another machine's run in this process until it ends; return the exit code.

    Raises:
        ConfigError: the key, the address, the version or a key of the configuration is wrong.
        NotStarted: the role failed before it began to work, see `StartGuard`.
    """
    from common.formats.chat_template import fix_prompts
    from common.join.enrol import enrol, parse_address
    from common.repository import code_name, product_version
    from common.stall.beacon import has_begun
    from common.wire.addresses import host_of, is_here
    from common.wire.messages import JoinRequest
    from common.wire.security import read_join_key
    from scheduler.members.older_code import without_unknown
    from tools.checks.hub_models import resolve_models
    from tools.launch.start_guard import StartGuard

    role = request.command
    overrides = request.overrides
    address = parse_address(request.join or "")
    key = read_join_key(Path(request.key or ""), role=role)
    question = JoinRequest(
        role=role,
        product=product_version(),
        commit=code_name(),
        is_remote=not is_here(host_of(address)),
        has_model=override_value(overrides, "model.path") is not None,
        name=override_value(overrides, f"{role}.name") or _own_name(role),
    )
    configure_logging(role, "INFO")
    joined = enrol(address, key, question)
    config = without_unknown(joined.config, joined.defaults)
    cfg = load_received(config, _with_defaults(role, overrides, joined))
    if role != "learner":
        cfg = resolve_models(cfg)
    if role == "actor":
        _check_weights(cfg, joined)
    configure_logging(role, cfg.log.level)
    fix_prompts(cfg.model)
    with StartGuard(None, has_begun=has_begun):
        run(cfg, joined)
    return 0


def _check_weights(cfg: RunConfig, joined: "Joined") -> None:
    """Check that an actor has the weights that the run does not send.

    Raises: ConfigError: the base model of the adapters or its own model folder is missing.
    """
    from tools.checks.preflight import check_model

    if cfg.model.path != joined.model_path:
        check_model(cfg.model.path)
    elif rank := cfg.learner.lora.in_engine.rank:
        raise ConfigError(
            f"learner.lora.rank={rank}: this run sends only adapters, without their base model"
            f" {joined.base}. Give model.path=FOLDER with a copy of the base model on this machine"
        )


def _own_name(role: str) -> str:
    """Return a name that no other process has."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _with_defaults(role: str, overrides: Sequence[str], joined: "Joined") -> list[str]:
    """Return the overrides plus a joining node's defaults for the keys that they do not set.

    The defaults are the folder of the received model and, for a hub, a reachable address.
    """
    if role == "learner":  # Its ranks use the run's own paths, or copies of these folders.
        return [*overrides]
    own = {"model.path": joined.model_path or "."}
    if role == "actor" and joined.sends_adapters and joined.source:
        own["model.path"] = joined.source  # The base of the adapters, from this node's cache.
    if role == "envhub":
        own["envhub.host"] = "0.0.0.0"
    given = [f"{key}={v}" for key, v in own.items() if override_value(overrides, key) is None]
    return [*overrides, *given]


def with_date(
    run: Callable[[RunConfig, RunDir], int], cfg: RunConfig, run_dir: RunDir, *, is_kept: bool
) -> int:
    """Run a command in whose prompts all dates are the same; return its exit code.

    Args:
        is_kept: as in `dated`.
    """
    from common.formats.chat_template import fix_prompts
    from common.store.run_start import dated

    cfg = dated(cfg, run_dir, is_kept=is_kept)
    fix_prompts(cfg.model)
    return run(cfg, run_dir)


def echo(text: str) -> int:
    """Print a text that contains its final line break; return exit code 0."""
    print(text, end="")
    return 0
