"""The terminal of a supervised run, and the commands `status` and `probe` of any version."""

import json
import logging
import shlex
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path

import yaml

from common.config.keys import field_kinds
from common.config.live import last_values, read_changes
from common.config.load import load_config, load_received, override_value
from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT, with_program_name
from common.store.run_dir import RunDir, as_map
from common.text import counted
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import load_joined, own_config
from tools.dashboard import beside
from tools.dashboard.beside import SideProcess, run_dashboard
from tools.dashboard.live import LiveDisplay
from tools.dashboard.run_state import (
    EtaEstimator,
    copy_line,
    details,
    is_run,
    part_line,
    parts_of,
    state_line,
    stop_line,
    why_not_live,
    why_not_ready,
)
from tools.dashboard.run_view import RunView, view_run
from tools.dashboard.web.server import url_of
from tools.launch.base import Ending, LaunchState

logger = logging.getLogger(__name__)

MAX_REFUSED_LINES = 20
STOP_S = 3.0  # Seconds for a process that serves metrics to end.


class TerminalObserver:
    """Shows a live panel or log lines, an optional web page, and the report.

    It never delays the run.
    """

    def __init__(self, cfg: RunConfig, run_dir: RunDir) -> None:
        self._cfg = cfg
        self._run_dir = run_dir
        self._pace = EtaEstimator(cfg.model)
        self._beside: list[SideProcess] = []  # Processes that are restarted during the run.
        self._copier: SideProcess | None = None
        self._display = LiveDisplay(
            self._read_view,
            title=f"longstride · {cfg.run.name}",
            subtitle=f"{cfg.train.mode} · seed {cfg.run.seed} · {run_dir.root}",
            is_wanted=cfg.log.live,
        )

    def _read_view(self) -> RunView:
        """Return the current state, and update the estimates of durations with it."""
        view = _view(self._cfg, self._run_dir)
        self._pace.observe(view)
        return view

    def start(self) -> None:
        """Start the display."""
        self._display.start()

    def annotate(self, state: LaunchState) -> LaunchState:
        """Return the launcher's state with the usual durations of starts and phases."""
        return replace(state, **self._pace.as_dict())

    def refresh(self) -> None:
        """Show the newest state of the run, and restart processes beside it that have ended."""
        for process in self._beside:
            process.poll()
        self._display.refresh()

    @contextmanager
    def page(self) -> Generator[None]:
        """Serve the dashboard and the metrics, and copy the run, as far as they are enabled.

        The copies continue until `conclude`, if it is reached.
        """
        cfg = self._cfg
        with ExitStack() as stack, ExitStack() as after_error:
            if cfg.dashboard:
                stack.enter_context(run_dashboard(self._run_dir))
            if cfg.log.metrics_port:
                listener = stack.enter_context(beside.metrics_listener(cfg))
                self._beside.append(beside.exporter(self._run_dir, listener))
                stack.callback(self._beside[-1].stop, timeout_s=STOP_S)
                print(f"metrics: {url_of(listener, '')}metrics")
            if cfg.journal.copy_to:
                self._copier = beside.copier(cfg, self._run_dir)
                self._beside.append(self._copier)
                after_error.callback(self._copier.stop, timeout_s=STOP_S)
            yield
            self._beside = []
            after_error.pop_all()  # The copies continue.

    def stop(self) -> None:
        """Stop the display and release the terminal."""
        self._display.stop()

    def conclude(self, ending: Ending, *, wall_s: float, peak_memory_bytes: int) -> None:
        """Print how to resume an interrupted run, or write the report of a finished run."""
        if ending.exit_code > 128:  # A signal ended the run.
            step = _view(self._cfg, self._run_dir).step
            print(f"{self._cfg.run.name}: {stop_line(self._run_dir, step)}", file=sys.stderr)
        if ending.exit_code == 0:
            _report(self._cfg, self._run_dir, wall_s=wall_s, peak_memory_bytes=peak_memory_bytes)
        self._finish_copy()

    def _finish_copy(self) -> None:
        """Copy the last state of the run within `journal.copy_stop_timeout_s`."""
        if self._copier is None:
            return
        name = self._cfg.run.name
        limit_s = self._cfg.journal.copy_stop_timeout_s
        print(f"{name}: copying the rest of the run, for at most {limit_s:g} s", file=sys.stderr)
        is_copied = self._copier.stop(timeout_s=limit_s)
        self._copier = None
        print(f"{name}: {copy_line(self._run_dir, is_whole=is_copied)}", file=sys.stderr)


def _report(cfg: RunConfig, run_dir: RunDir, *, wall_s: float, peak_memory_bytes: int) -> None:
    """Write the report of a finished run, mark the run as finished, and print the paths."""
    from common.store.run_start import mark_finished
    from tools.report.results import summary, write_report

    report = write_report(run_dir, cfg, wall_s=wall_s, peak_memory_bytes=peak_memory_bytes)
    num_steps = _view(cfg, run_dir).num_steps
    mark_finished(run_dir, version=num_steps, result=summary(report))
    print(f"{cfg.run.name}: {_state(cfg, run_dir)}")
    print(f"report: {run_dir.root / 'report.html'}")
    folder = run_dir.root.parent
    where = "" if folder == ROOT / "runs" else f" {shlex.quote(f'run.dir={folder}')}"
    print(with_program_name(f"all episodes: python run.py dashboard {run_dir.root.name}{where}"))


def status(cfg: RunConfig, run_dir: RunDir) -> int:
    """Print the state of a run and of the commands beside it; return the exit code."""
    lines: list[str] = []
    parts = parts_of(run_dir.root)
    if is_run(run_dir.root) or not parts:
        lines = [f"{run_dir.root}: {_state(cfg, run_dir)}", *details(cfg, run_dir)]
        lines += refused_lines(run_dir)
    print("\n".join([*lines, *(f"{part}: {part_line(part)}" for part in parts)]))
    return 0


def probe(cfg: RunConfig, run_dir: RunDir, kind: str) -> int:
    """Print whether a run is `live`, `ready` or finished, or why not; return 0 if it is, else 1."""
    if kind == "live":
        reason = why_not_live(run_dir)
    else:
        reason = why_not_ready(run_dir, _view(cfg, run_dir))
    state = "finished" if run_dir.finished.exists() else kind
    print(f"{run_dir.root}: {f'not {kind}: {reason}' if reason else state}")
    return 1 if reason else 0


def _state(cfg: RunConfig, run_dir: RunDir) -> str:
    """Return the state line of a run."""
    return state_line(run_dir, _view(cfg, run_dir))


def _view(cfg: RunConfig, run_dir: RunDir) -> RunView:
    """Return the current state of a run."""
    changed = last_values(read_changes(run_dir.config_changes)).get("train.num_steps")
    train = cfg.train if changed is None else replace(cfg.train, num_steps=int(changed))
    return view_run(run_dir, train, cfg.horizon)


def refused_lines(run_dir: RunDir) -> list[str]:
    """Return text lines about the messages and connections that a run's listeners refused."""
    try:
        refused = json.loads(run_dir.status.read_bytes()).get("refused", {})
    except (OSError, ValueError):
        return []
    scheduler = refused.get("scheduler", {})
    lines = [
        f"  refused of {name[:80]!r}: {peer['invalid']} invalid, {peer['forbidden']} forbidden,"
        f" {counted(peer['dropped'], 'unread message')}; last: {peer['last_reason'][:200]!r}"
        for name, peer in scheduler.get("peers", {}).items()
    ]
    for cause, num in scheduler.get("connections", {}).get("refused", {}).items():
        lines.append(f"  refused connections ({cause}): {num}")
    for by, whom in (("the learner", "learner"), ("hubs", "hubs")):
        for who, num in refused.get(whom, {}).items():
            lines.append(f"  refused by {by} ({who[:100]!r}): {num}")
    return lines[:MAX_REFUSED_LINES]


def load_of_any_version(request: ParsedCommand) -> RunConfig:
    """Return the config of an existing run, written by any product version.

    Unknown keys are ignored with a note. A missing or damaged config also only gives a note.

    Raises: ConfigError: there is no such run, or the request itself is wrong.
    """
    try:
        return load_joined(request)
    except ConfigError as error:
        name = override_value(request.overrides, "run.name")
        if name is None:
            raise
        config_path = own_config(request.overrides, name)
        if not is_run(config_path.parent):
            if parts_of(config_path.parent):  # Commands such as `sft` have worked under this name.
                return _known_part(config_path)
            raise
        if _is_whole(config_path):
            raise
        why = f"{config_path} is missing" if not config_path.is_file() else str(error)
        reason = " ".join(why.split()).rstrip(".")
        print(f"note: {reason}. Another version may have written this run; known keys are shown.")
        return _known_part(config_path)


def _is_whole(config_path: Path) -> bool:
    """Return whether a run's config loads in this version. If it does, the request is at fault."""
    try:
        load_config(str(config_path), [])
    except ConfigError:
        return False
    return True


def _known_part(path: Path) -> RunConfig:
    """Return the keys of a run's config.yaml that this version has; the others get defaults."""
    kinds = field_kinds(RunConfig)
    try:
        content: object = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        content = {}
    sections = {
        section: {k: v for k, v in as_map(keys).items() if k in field_kinds(kinds[section])}
        for section, keys in as_map(content).items()
        if section in kinds and is_dataclass(kinds[section]) and as_map(keys)
    }
    run = {"name": path.parent.name, "dir": str(path.parents[1])}
    try:
        model = {"path": "unknown"} | sections.get("model", {})
        text = yaml.safe_dump({**sections, "model": model, "run": sections.get("run", {}) | run})
        return load_received(text, [])
    except (ConfigError, ValueError):
        return RunConfig(
            model=ModelSection(path="unknown"), run=RunSection(name=run["name"], dir=run["dir"])
        )
