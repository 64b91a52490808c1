"""The commands about a whole run: which configuration a request means, `train` and `status`."""

import contextlib
import difflib
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.command_line import Request
from common.config.knobs import FILE_NAME, PATH
from common.config.load import find_config, load_config, load_told, override_value, save_config
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.launch.base import RoleStarter
from common.log import configure_logging
from common.repository import ROOT
from common.store.run_dir import RunDir

if TYPE_CHECKING:
    from common.join.enrol import Joined

DEFAULT_CONFIG = "quickstart"


def belongs_to_no_run(request: Request) -> bool:
    """Return whether neither a config nor a run is named."""
    keys = ("run.name", "run.dir")
    named = [key for key in keys if override_value(request.overrides, key) is not None]
    return request.config is None and not named


def load_named(request: Request, *, root: Path, defaults: Sequence[str] = ()) -> RunConfig:
    """Return the config of a request, its overrides after `defaults`; a named run has its own."""
    overrides = [*defaults, *request.overrides]
    if request.config is None and (name := override_value(overrides, "run.name")) is not None:
        own = own_config(overrides, name, root=root)
        if own.is_file():
            return load_config(str(own), overrides, root=root)
    named = request.config or DEFAULT_CONFIG
    return load_config(named, overrides, root=root, is_dry=request.is_dry)


def load_joined(request: Request, *, root: Path) -> RunConfig:
    """Return the config of the run that a role joins or that is asked about.

    Without `run.name` it is the one that `--config` names, then the latest.

    Raises:
        ConfigError: there is no such run; names the nearest one there is. Only a scheduler that is
            given a `--config` begins a run.
    """
    overrides = request.overrides
    name = override_value(overrides, "run.name")
    if name is None and request.config is not None:
        name = find_config(request.config, root=root).stem
    if name is None:
        latest = _folder(overrides, root=root) / "latest"
        name = latest.resolve().name if latest.exists() else DEFAULT_CONFIG
    own = own_config(overrides, name, root=root)
    if own.is_file():
        return load_config(str(own), overrides, root=root)
    if request.command == "scheduler" and request.config is not None:
        return load_config(request.config, overrides, root=root)
    load_config(request.config or DEFAULT_CONFIG, overrides, root=root)  # a wrong key is said first
    raise ConfigError(f"run.name={name}: no such run below {own.parents[1]}/{_nearest_run(own)}")


def _folder(overrides: Sequence[str], *, root: Path) -> Path:
    folder = override_value(overrides, "run.dir")
    if folder is not None and not PATH.fits(folder):
        raise ConfigError(f"run.dir={folder!r:.100}: {PATH.phrase}")
    return root / (folder or "runs")


def own_config(overrides: Sequence[str], name: str, *, root: Path) -> Path:
    """Return where a run keeps its configuration. Raises: ConfigError: no name of a run."""
    if not FILE_NAME.fits(name):  # before it is taken for a path
        raise ConfigError(f"run.name={name!r:.100}: {FILE_NAME.phrase}")
    return _folder(overrides, root=root) / name / "config.yaml"


def _nearest_run(own: Path) -> str:
    known = sorted({path.parent.name for path in own.parents[1].glob("*/config.yaml")} - {"latest"})
    near = difflib.get_close_matches(own.parent.name, known, n=1, cutoff=0.0)
    return f"; the nearest is {near[0]}" if near else ", nor any other; start one with `train`"


def train(cfg: RunConfig, run_dir: RunDir, *, root: Path) -> int:
    """Start all roles, wait for the end, write the report; return the exit code."""
    from common.checks.machine import gpus
    from common.checks.preflight import check_devices
    from common.dashboard.run_state import stop_line
    from common.dashboard.run_view import view_run
    from common.launch.lock import hold_run
    from common.launch.roles import make_role_specs
    from common.launch.supervise import supervise
    from common.store.run_start import keep_tokenizer, prepare
    from common.wire.security import create_keys

    is_here = cfg.launcher is Launcher.LOCAL
    seats = check_devices(cfg) if is_here else None
    started = time.monotonic()
    with hold_run(run_dir.root, name=cfg.run.name), _starter(cfg, run_dir) as starter:
        cfg = reachable_at(cfg, starter.host)
        prepare(cfg, run_dir)
        run_dir.root.mkdir(parents=True, exist_ok=True)
        for role in ("envhub", "scheduler"):
            run_dir.forget_address(role)
        create_keys(run_dir.keys)
        save_config(cfg, run_dir.config)
        keep_tokenizer(cfg, run_dir, root=root)
        _point_latest(run_dir)
        specs = make_role_specs(
            cfg.run,
            run_dir,
            root=root,
            num_actors=cfg.actor.num_engines,
            has_hub=cfg.envhub.is_started and not cfg.envhub.url,
            seats=seats,
            found=gpus() if is_here else (),
        )
        ending, peak_memory_bytes = supervise(cfg, run_dir, specs, starter)
    if ending.exit_code > 128:  # by a signal
        step = view_run(run_dir, cfg.train, cfg.horizon).step
        print(f"{cfg.run.name}: {stop_line(run_dir, step)}", file=sys.stderr)
    elif ending.exit_code != 0:
        print(f"error: {ending.reason}", file=sys.stderr)
    if ending.exit_code != 0:
        return ending.exit_code
    wall_s = time.monotonic() - started
    _report(cfg, run_dir, wall_s=wall_s, peak_memory_bytes=peak_memory_bytes)
    return 0


@contextlib.contextmanager
def _starter(cfg: RunConfig, run_dir: RunDir) -> Generator[RoleStarter]:
    """Yield what starts the roles: here, or on the nodes of a Ray cluster."""
    with contextlib.ExitStack() as stack:
        if cfg.launcher is Launcher.RAY:
            from common.launch.ray.cluster import start_on_ray

            yield stack.enter_context(start_on_ray(cfg, run_dir))
        else:
            from common.launch.local import start_here

            yield stack.enter_context(start_here())


def reachable_at(cfg: RunConfig, host: str) -> RunConfig:
    """Return a config whose roles listen where other nodes reach them, unless it says where."""
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
    """Return a config whose roles listen on the loopback address that this machine has.

    That is ::1 where there is no 127.0.0.1, and the other way round.
    """
    from common.host.loopback import IPV4, IPV6, can_bind, loopback

    own = {
        name: replace(section, host=loopback())
        for name in ("scheduler", "learner", "envhub")
        if (host := (section := getattr(cfg, name)).host) in (IPV4, IPV6) and not can_bind(host)
    }
    return replace(cfg, **own) if own else cfg


def _report(cfg: RunConfig, run_dir: RunDir, *, wall_s: float, peak_memory_bytes: int) -> None:
    from common.report.write import summary, write_report
    from common.store.run_start import mark_finished

    report = write_report(run_dir, cfg, wall_s=wall_s, peak_memory_bytes=peak_memory_bytes)
    mark_finished(run_dir, version=cfg.train.num_steps, result=summary(report))
    print(f"{cfg.run.name}: {_state(cfg, run_dir)}")
    print(f"report: {run_dir.root / 'report.html'}")
    folder = run_dir.root.parent
    where = "" if folder == ROOT / "runs" else f" {shlex.quote(f'run.dir={folder}')}"
    print(f"every episode of it: python run.py dashboard {run_dir.root.name}{where}")


def _point_latest(run_dir: RunDir) -> None:
    latest = run_dir.root.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(run_dir.root.name)


def status(cfg: RunConfig, run_dir: RunDir) -> int:
    """Print how a run is doing; return the exit code."""
    from common.dashboard.run_state import details
    from common.launch.keys import refused_lines

    lines = [f"{run_dir.root}: {_state(cfg, run_dir)}", *details(cfg, run_dir)]
    print("\n".join([*lines, *refused_lines(run_dir)]))
    return 0


def probe(cfg: RunConfig, run_dir: RunDir, kind: str) -> int:
    """Print whether a run is `live` or `ready`, or why not; return 0 if it is, else 1."""
    from common.dashboard.probe import why_not_live, why_not_ready
    from common.dashboard.run_view import view_run

    if kind == "live":
        reason = why_not_live(run_dir)
    else:
        reason = why_not_ready(run_dir, view_run(run_dir, cfg.train, cfg.horizon))
    print(f"{run_dir.root}: {f'not {kind}: {reason}' if reason else kind}")
    return 1 if reason else 0


def _state(cfg: RunConfig, run_dir: RunDir) -> str:
    from common.dashboard.run_state import state_line
    from common.dashboard.run_view import view_run

    return state_line(run_dir, view_run(run_dir, cfg.train, cfg.horizon))


def be_role(
    name: str, run: Callable[[RunConfig, RunDir], None], cfg: RunConfig, run_dir: RunDir
) -> int:
    """Be one role in this process until it ends; return the exit code."""
    from common.wire.security import create_keys

    configure_logging(name, cfg.log.level)
    if name == "scheduler":  # it begins a run; the others join one
        create_keys(run_dir.keys)
    if not run_dir.config.exists():
        save_config(cfg, run_dir.config)
    run(cfg, run_dir)
    return 0


def join_run(request: Request, run: Callable[[RunConfig, "Joined"], None], *, root: Path) -> int:
    """Be a role of a run that another machine holds, until it ends; return the exit code.

    Raises: ConfigError: the key, the address, the version or a key of the configuration is wrong.
    """
    from common.join.enrol import enrol, parse_address
    from common.repository import product_version
    from common.wire.addresses import host_of, is_here
    from common.wire.join_messages import JoinRequest
    from common.wire.security import read_join_key

    role, overrides = request.command, request.overrides
    address = parse_address(request.join or "")
    key = read_join_key(Path(request.key or ""), role=role)
    question = JoinRequest(
        role=role,
        product=product_version(),
        is_remote=not is_here(host_of(address)),
        has_model=override_value(overrides, "model.path") is not None,
        name=override_value(overrides, f"{role}.name") or _own_name(role),
    )
    configure_logging(role, "INFO")
    joined = enrol(address, key, question)
    cfg = load_told(joined.config, _with_defaults(role, overrides, joined), root=root)
    if role == "actor":
        _check_weights(cfg, joined, root=root)
    configure_logging(role, cfg.log.level)
    run(cfg, joined)
    return 0


def _check_weights(cfg: RunConfig, joined: "Joined", *, root: Path) -> None:
    """Return if an actor has on its own disk what the run does not send it.

    Raises: ConfigError: it does not: the weights that adapters belong to, or those it says it has.
    """
    from common.checks.preflight import check_model

    if not joined.model_path:
        check_model(cfg.model.path, root)
    elif rank := cfg.learner.lora.rank:
        raise ConfigError(
            f"learner.lora.rank={rank}: this run sends adapters only, not the {joined.base} that"
            " they are added to; give model.path=FOLDER with a copy of that model on this machine"
        )


def _own_name(role: str) -> str:
    """Return a name that no other process has."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _with_defaults(role: str, overrides: Sequence[str], joined: "Joined") -> list[str]:
    """Return the overrides with what a joining node has for itself, unless one is given.

    That is the folder of the model that was sent, and a hub that others can reach.
    """
    own = {"model.path": joined.model_path or "."}
    if role == "envhub":
        own["envhub.host"] = "0.0.0.0"
    given = [f"{key}={v}" for key, v in own.items() if override_value(overrides, key) is None]
    return [*overrides, *given]


def say(text: str) -> int:
    """Print a text that ends its last line itself; return the exit code."""
    print(text, end="")
    return 0
