"""The terminal display of a run: a live panel on a terminal, a status line in the log elsewhere."""

import logging
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
from common.dashboard.run_view import LEDGER_KEYS, RoleView, RunView, view_run
from common.store.run_dir import RunDir

logger = logging.getLogger(__name__)

_SILENT_S = 5.0  # the scheduler writes its status once a second
_SPARKS = "▁▂▃▄▅▆▇█"


class LiveDisplay:
    """Shows a run from its files alone. `refresh` may be called as often as the caller likes."""

    def __init__(
        self,
        run_dir: RunDir,
        cfg: RunConfig,
        *,
        console: Console | None = None,
        live_interval_s: float = 0.5,
        plain_interval_s: float = 10.0,
    ) -> None:
        self._run_dir = run_dir
        self._cfg = cfg
        self._console = console or Console(stderr=True)
        self.is_live = cfg.log.live and self._console.is_terminal
        self._interval_s = live_interval_s if self.is_live else plain_interval_s
        self._next_s = 0.0
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
        self._next_s = now_s + self._interval_s
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        elif not self.is_live:
            logger.info("%s", status_line(view_run(self._run_dir, self._cfg)))

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
            border_style="red" if _is_silent(view) else "dim",
        )


def status_line(view: RunView) -> str:
    """Return the run in one line; what is not known is left out."""
    parts = [f"step {view.step}/{view.num_steps}"]
    if view.phase != "train":
        parts.insert(0, view.phase)
    parts += [
        f"success {_fraction(view.success)}" if view.success is not None else "",
        f"{_horizon(view)}" if view.horizon is not None else "",
        f"lag {view.lag_mean:.1f}" if view.lag_mean is not None else "",
        _rate("actor", view.actor_tokens_per_s),
        _rate("learner", view.learner.tokens_per_s),
        _groups(view),
        f"eta {_duration(view.eta_s)}" if view.eta_s else "",
    ]
    line = " ".join(part for part in parts if part)
    if view.waits:
        line += f"; waiting: {_waits(view)}"
    if _is_silent(view):
        line += f"; scheduler silent for {_duration(view.silent_s)}"
    return _plain(line)


def _progress(view: RunView) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(width=12)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=max(1, view.num_steps), completed=min(view.step, view.num_steps))
    eta = f"  eta {_duration(view.eta_s)}" if view.eta_s else ""
    row.add_row(Text(_plain(view.phase), "bold"), bar, f"{view.step}/{view.num_steps}{eta}")
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
        ("waiting", _waits(view), "yellow"),
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
    """Return the books as an equation: issued = trained + ... + in flight; "" if there are none."""
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
    return f"silent for {_duration(view.silent_s)}" if _is_silent(view) else ""


def _is_silent(view: RunView) -> bool:
    return view.silent_s is not None and view.silent_s > _SILENT_S and view.phase != "finished"


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
