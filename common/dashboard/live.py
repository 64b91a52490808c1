"""The terminal display of a run: a live panel on a terminal, a status line in the log elsewhere."""

import logging
import math
import sys
import time
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.config.run_config import RunConfig
from common.dashboard.run_view import LEDGER_KEYS, PHASES, RoleView, RunView, view_run
from common.store.run_dir import RunDir

logger = logging.getLogger(__name__)

MAX_SILENCE_S = 30.0  # of a log
ENGINES_SHOWN = 3
_SPARKS = "▁▂▃▄▅▆▇█"


class LiveDisplay:
    """Shows a run from its files alone. `refresh` may be called as often as the caller likes."""

    def __init__(
        self,
        run_dir: RunDir,
        cfg: RunConfig,
        *,
        console: Console | None = None,
        interval_s: float = 10.0,
        look_s: float = 0.5,
    ) -> None:
        self._run_dir = run_dir
        self._cfg = cfg
        self._console = console or Console(stderr=True)
        self.is_live = cfg.log.live and self._console.is_terminal
        self._interval_s = interval_s  # between lines of a log while only numbers change
        self._look_s = look_s
        self._next_s = 0.0
        self._logged_s = -math.inf
        self._logged_phase: tuple[object, ...] = ()
        self._logged_progress: tuple[object, ...] = ()
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def start(self) -> None:
        """Take the terminal, if there is one. Log lines scroll above the panel meanwhile."""
        if not self.is_live:
            return
        before = (sys.stdout, sys.stderr)
        self._live = Live(self._panel(), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            writing = cast("logging.StreamHandler[TextIO]", handler)
            stream = writing.stream
            if stream in before:
                writing.setStream(sys.stderr)  # now the display's, which keeps the panel whole
                self._moved.append((writing, stream))

    def refresh(self) -> None:
        """Show the newest state, if the last showing is long enough ago."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._look_s
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        elif not self.is_live:
            self._log(view_run(self._run_dir, self._cfg), now_s)

    def _log(self, view: RunView, now_s: float) -> None:
        """Log a line at a change of phase, at progress every 10 s, and at least every 30 s."""
        phase = (view.phase, *sorted(view.starting), view.stop_in_s is not None)
        progress = (view.step, view.progress)
        silent_s = now_s - self._logged_s
        has_moved = progress != self._logged_progress and silent_s >= self._interval_s
        if phase != self._logged_phase or has_moved or silent_s >= MAX_SILENCE_S:
            self._logged_phase, self._logged_progress, self._logged_s = phase, progress, now_s
            logger.info("%s", status_line(view))

    def stop(self) -> None:
        """Show the final state and give the terminal back. Stopping twice is allowed."""
        if self._live is None:
            return
        self._live.update(self._panel(), refresh=True)
        self._live.stop()
        self._live = None
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()

    def _panel(self) -> Panel:
        cfg = self._cfg
        view = view_run(self._run_dir, cfg)
        parts: list[RenderableType] = [_progress(view), _facts(view)]
        if view.actors:
            parts.append(_roles(view))
        if view.warnings:
            parts.append(Text("\n".join(_plain(w) for w in view.warnings), style="yellow"))
        return Panel(
            Group(*parts),
            title=Text(f"longstride · {cfg.run.name}"),
            subtitle=Text(f"{cfg.train.mode} · seed {cfg.run.seed} · {self._run_dir.root}"),
            border_style="red" if view.is_silent else "dim",
        )


def status_line(view: RunView) -> str:
    """Return the run in one line; what is not known is left out."""
    parts = [
        "" if view.phase == PHASES["train"] else f"{_phase(view)},",
        f"step {view.step}/{view.num_steps}",
        f"success {_fraction(view.success)}" if view.success is not None else "",
        f"{_horizon(view)}" if view.horizon is not None else "",
        f"lag {view.lag_mean:.1f}" if view.lag_mean is not None else "",
        _rate("actor", view.actor_tokens_per_s),
        _rate("learner", view.learner.tokens_per_s),
        _groups(view),
        _times(view, " "),
    ]
    line = " ".join(part for part in parts if part)
    ends = [starting_text(view.starting), _stopping(view)]
    ends += [f"waiting: {_waits(view)}"] if view.waits else []
    ends += [f"scheduler {_silence(view)}"] if view.is_silent else []
    return _plain("; ".join([line, *filter(None, ends)]))


def starting_text(starting: dict[str, float]) -> str:
    """Return what is starting and for how long, such as "engine is starting (34s)"."""
    texts = [
        f"{name} is starting ({_duration(since_s)})"
        for name, since_s in starting.items()
        if not name.startswith("actor")
    ]
    engines = {name: since_s for name, since_s in starting.items() if name.startswith("actor")}
    oldest = _duration(max(engines.values(), default=0.0))
    if len(engines) > ENGINES_SHOWN:
        texts.append(f"{len(engines)} engines are starting ({oldest})")
    elif len(engines) == 1:
        texts.append(f"engine is starting ({oldest})")
    elif engines:
        texts.append(f"engines of {', '.join(engines)} are starting ({oldest})")
    return ", ".join(texts)


def _stopping(view: RunView) -> str:
    if view.stop_in_s is None:
        return ""
    left = _duration(view.stop_in_s)
    return f"stopping: the learner may take {left} to save; Ctrl-C again stops at once"


def _phase(view: RunView) -> str:
    if view.progress is None:
        return view.phase
    num_done, num_total = view.progress
    return f"{view.phase} {num_done}/{num_total}"


def _times(view: RunView, gap: str) -> str:
    elapsed = "" if view.elapsed_s is None else f"elapsed {_duration(view.elapsed_s)}"
    eta = f"eta {_duration(view.eta_s)}" if view.eta_s else ""
    return gap.join(filter(None, [elapsed, eta]))


def _progress(view: RunView) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(width=12 if view.phase == PHASES["train"] else 27)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    done, total = view.progress or (view.step, view.num_steps)
    bar = ProgressBar(total=max(1, total), completed=min(done, total))
    times = "  ".join(filter(None, [f"{done}/{total}", _times(view, "  ")]))
    row.add_row(Text(_plain(view.phase), "bold"), bar, times)
    return row


def _facts(view: RunView) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=12, style="dim")
    table.add_column()
    for label, text, style in (
        ("success", _success(view), "bold green"),
        ("by subset", _subsets(view), ""),
        ("horizon", _horizon(view).removeprefix("horizon "), ""),
        ("lag", _lag(view), ""),
        ("tokens/s", _rates(view), ""),
        ("groups", _groups(view).removeprefix("groups "), ""),
        (
            "ledger",
            ledger_line(view.ledger),
            "bold red" if view.ledger.get("lost") else "",
        ),
        ("memory", _memory(view), ""),
        ("starting", starting_text(view.starting), "yellow"),
        ("waiting", _waits(view), "yellow"),
        ("stop", _stopping(view).removeprefix("stopping: "), "bold yellow"),
        ("scheduler", _silence(view), "bold red"),
    ):
        if text:
            table.add_row(label, Text(_plain(text), style=style))
    return table


def _roles(view: RunView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("role", "version", "running", "tok/s", "waits for", "last seen"):
        is_text = column in ("role", "waits for")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for role in [view.learner, *view.actors]:
        table.add_row(*(Text(_plain(cell)) for cell in _role_cells(role)))
    return table


def _role_cells(role: RoleView) -> tuple[str, ...]:
    return (
        role.name,
        "" if role.version is None else f"v{role.version}",
        str(role.num_running or ""),
        "" if role.tokens_per_s is None else f"{role.tokens_per_s:.0f}",
        role.waiting_for,
        "" if role.last_seen_s is None else f"{_duration(role.last_seen_s)} ago",
    )


def ledger_line(ledger: dict[str, int]) -> str:
    """Return the ledger as an equation: issued = trained + ... + in flight; "" if unknown."""
    if "issued" not in ledger:
        return ""
    terms = [f"{k.replace('_', ' ')} {ledger[k]}" for k in LEDGER_KEYS if k in ledger]
    lost = f"   lost {ledger['lost']}" if "lost" in ledger else ""
    return f"issued {ledger['issued']} = {' + '.join(terms)}{lost}"


def sparkline(values: list[float]) -> str:
    """Return one block character per value, between 0 and 1."""
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(min(1.0, max(0.0, value)) * last)] for value in values)


def _success(view: RunView) -> str:
    train = "" if view.success is None else f"{_fraction(view.success)} train"
    before = "" if view.success_before is None else f"{_fraction(view.success_before)} before"
    return "   ".join(part for part in (train, sparkline(view.success_steps), before) if part)


def _subsets(view: RunView) -> str:
    return "  ".join(f"{k} {_fraction(v)}" for k, v in sorted(view.success_by_subset.items()))


def _horizon(view: RunView) -> str:
    if view.horizon is None:
        return ""
    stage = "" if view.stage is None else f" (stage {view.stage + 1}/{view.num_stages})"
    return f"horizon {view.horizon:.0f}{stage}"


def _lag(view: RunView) -> str:
    mean = "" if view.lag_mean is None else f"mean {view.lag_mean:.2f}"
    most = "" if view.lag_max is None else f"max {view.lag_max:.0f}"
    return "  ".join(part for part in (mean, most) if part)


def _rates(view: RunView) -> str:
    rates = (
        _rate("actor", view.actor_tokens_per_s),
        _rate("learner", view.learner.tokens_per_s),
    )
    return "   ".join(rate.removesuffix(" tok/s") for rate in rates if rate)


def _rate(name: str, tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{name} {tokens_per_s:.0f} tok/s"


def _groups(view: RunView) -> str:
    opened = "" if view.num_open is None else f" {view.num_open} open"
    ready = "" if view.num_ready is None else f" {view.num_ready} ready"
    return f"groups{opened}{ready}" if opened or ready else ""


def _memory(view: RunView) -> str:
    roles = [role for role in (view.learner, *view.actors) if role.rss_bytes]
    return "  ".join(f"{role.name} {(role.rss_bytes or 0) / 2**30:.2f} GiB" for role in roles)


def _waits(view: RunView) -> str:
    return ", ".join(f"{who} <- {whom}" for who, whom in view.waits)


def _silence(view: RunView) -> str:
    return f"silent for {_duration(view.silent_s)}" if view.is_silent else ""


def _fraction(value: float) -> str:
    return f"{value:.2f}"


def _duration(seconds: float | None) -> str:
    whole = round(seconds or 0.0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _plain(text: str) -> str:
    """Return the text without control characters, which could rewrite the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
