"""The terminal display of a run: a live panel on a terminal, a status line in the log elsewhere."""

import logging
import math
import sys
import time
from collections.abc import Callable
from itertools import starmap
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.text import plain
from tools.dashboard import words
from tools.dashboard.run_view import RunView

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0  # Minimum interval between two log lines while only numbers change.
MAX_SILENCE_S = 30.0


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
