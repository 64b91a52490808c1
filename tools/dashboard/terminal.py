"""The terminal of a supervised run, and the commands `status` and `probe` of any version.

The display is a live panel on a terminal, and a status line in the log elsewhere.
"""

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import TextIO, cast

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.config.keys import field_kinds
from common.config.live import last_values, read_changes
from common.config.load import load_config, load_received, override_value
from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT, with_program_name
from common.store.run_dir import RunDir, as_map
from common.text import counted, plain
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import load_joined, own_config
from tools.dashboard import beside, words
from tools.dashboard.beside import SideProcess, run_dashboard
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

INTERVAL_S = 10.0  # Minimum interval between two log lines while only numbers change.
MAX_SILENCE_S = 30.0
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


class LiveDisplay:
    """Displays the run view that `read_view` returns. `refresh` limits its own rate."""

    def __init__(
        self,
        read_view: Callable[[], RunView],
        *,
        title: str,
        subtitle: str,
        is_wanted: bool,
        console: Console | None = None,
        refresh_s: float = 0.5,
    ) -> None:
        self._read_view = read_view
        self._title = title
        self._subtitle = subtitle
        self._console = console or Console(stderr=True)
        self.is_live = is_wanted and self._console.is_terminal
        self._refresh_s = refresh_s
        self._next_s = 0.0
        self._logged_s = -math.inf
        self._logged_phase: tuple[object, ...] = ()
        self._logged_progress: tuple[object, ...] = ()
        self._logged_failures: set[tuple[str, str]] = set()
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def start(self) -> None:
        """Show the panel if the output is a terminal. Log lines then scroll above the panel."""
        if not self.is_live:
            return
        before = (sys.stdout, sys.stderr)
        self._live = Live(self._panel(self._read_view()), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            writing = cast("logging.StreamHandler[TextIO]", handler)
            stream = writing.stream
            if stream in before:
                # The display's stream prints log lines above the panel.
                writing.setStream(sys.stderr)
                self._moved.append((writing, stream))

    def refresh(self) -> None:
        """Show the newest state, at most once per `refresh_s` seconds."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._refresh_s
        view = self._read_view()
        self._log_failures(view)
        if self._live is not None:
            self._live.update(self._panel(view), refresh=True)
        elif not self.is_live:
            self._log(view, now_s)

    def _log_failures(self, view: RunView) -> None:
        """Log the first error of each kind that fails episodes, above a live panel."""
        for failure in view.status.failures:
            if (failure.cause, failure.error) not in self._logged_failures:
                self._logged_failures.add((failure.cause, failure.error))
                text = "episodes fail cause=%s num=%d error=%s"
                logger.warning(text, plain(failure.cause), failure.num, plain(failure.error))

    def _log(self, view: RunView, now_s: float) -> None:
        """Log a line when the phase changes, every 10 s on progress, and at least every 30 s."""
        stands = bool(view.status.notice), view.stop_in_s is not None
        phase = (view.phase, *sorted(view.starting), *stands)
        progress = (view.step, view.status.num_done, view.status.num_total)
        silent_s = now_s - self._logged_s
        has_moved = progress != self._logged_progress and silent_s >= INTERVAL_S
        if phase != self._logged_phase or has_moved or silent_s >= MAX_SILENCE_S:
            self._logged_phase = phase
            self._logged_progress = progress
            self._logged_s = now_s
            logger.info("%s", words.status_line(view))

    def stop(self) -> None:
        """Show the final state and release the terminal. A second call has no effect."""
        if self._live is None:
            return
        self._live.update(self._panel(self._read_view()), refresh=True)
        self._live.stop()
        self._live = None
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()

    def _panel(self, view: RunView) -> Panel:
        """Return the panel with a state."""
        parts: list[RenderableType] = [_progress(view), _facts(view)]
        if view.status.actors:
            parts.append(_roles(view))
        if view.warnings:
            parts.append(Text("\n".join(plain(w) for w in view.warnings), style="yellow"))
        return Panel(
            Group(*parts),
            title=Text(self._title),
            subtitle=Text(self._subtitle),
            border_style="red" if view.is_silent else "dim",
        )


def _progress(view: RunView) -> Table:
    """Return the bar of the phase's progress, with its counts and remaining time."""
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(width=12 if view.status.phase == "train" else 27)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    done = view.status.num_done
    total = view.status.num_total
    if not total:
        done = view.step
        total = view.num_steps
    bar = ProgressBar(total=max(1, total), completed=min(done, total))
    left = words.if_known("{} left", words.left_text(view))
    times = "  ".join(filter(None, [f"{done}/{total}", left, words.times(view, "  ")]))
    row.add_row(Text(plain(view.phase), "bold"), bar, times)
    return row


def _facts(view: RunView) -> Table:
    """Return the table of the run's numbers."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=12, style="dim")
    table.add_column()
    status = view.status
    if_known = words.if_known
    ledger = status.ledger
    sparks = words.sparkline(view.success_steps)
    success = [
        if_known("{:.2f} in training", view.success),
        sparks,
        if_known("{:.2f} before training", status.success_before),
    ]
    subsets = [f"{name} {share:.2f}" for name, share in sorted(status.success.items())]
    lag = [if_known("mean {:.2f}", view.lag_mean), if_known("max {:.0f}", view.lag_max)]
    rates = {"actor {:.0f}": view.actor_tokens_per_s, "learner {:.0f}": status.learner.tokens_per_s}
    memory = [f"{r.name} {r.rss_bytes / 2**30:.2f} GiB" for r in view.roles if r.rss_bytes]
    for label, text, style in (
        ("success", "   ".join(filter(None, success)), "bold green"),
        ("group reward", if_known("{:.2f} in training", view.group_reward), ""),
        ("by subset", "  ".join(subsets), ""),
        ("horizon", words.horizon_text(view).removeprefix("horizon "), ""),
        ("lag", "  ".join(filter(None, lag)), ""),
        ("tokens/s", "   ".join(filter(None, starmap(if_known, rates.items()))), ""),
        ("groups", words.groups_text(view).removeprefix("groups "), ""),
        ("ledger", words.ledger_line(ledger), "bold red" if ledger.get("lost") else ""),
        ("memory", "  ".join(memory), ""),
        ("starting", words.starting_text(view.starting, view.usual_s), "yellow"),
        ("waiting", words.waits_text(view), "yellow"),
        ("stop", words.stopping_text(view).removeprefix("stopping: "), "bold yellow"),
        ("scheduler", words.silence_text(view), "bold red"),
        ("signal", view.status.notice, "bold yellow"),
    ):
        if text:
            table.add_row(label, Text(plain(text), style=style))
    return table


def _roles(view: RunView) -> Table:
    """Return the table of the roles."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("role", "version", "running", "tok/s", "waits for", "last seen"):
        is_text = column in ("role", "waits for")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for role in view.roles:
        cells = (
            role.name,
            words.if_known("v{}", role.version),
            str(role.running or ""),
            words.if_known("{:.0f}", role.tokens_per_s),
            role.waiting_for,
            "" if role.last_seen_s is None else f"{words.duration(role.last_seen_s)} ago",
        )
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table
