"""The command `report`: the dashboard's page as one file, for one run or several side by side.

The page shows runs without a server: its scripts read the server's answers from the element
`answers`. A content security policy forbids the page to load any other resource.
"""

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.errors import ConfigError, WireError
from common.repository import ROOT
from common.store.run_dir import json_object, write_atomically
from common.text import html_text, plain
from learner.views import samples
from tools.cli.command_line import ParsedCommand
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.reading.sources import open_source
from tools.dashboard.web.app import STATIC
from tools.dashboard.web.views import compare, drawn_names, fleet, overview

MAX_EPISODES_BYTES = 8 << 20  # Maximum size of all sample episodes of a page.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline';"
    " img-src data:; base-uri 'none'; form-action 'none'"
)
AS_IN_SCRIPTS = "!*'()"  # Characters that `encodeURIComponent` leaves unescaped, unlike `quote`.
_IMPORT = re.compile(r'"\./([\w-]+\.js)"')
USAGE = "report RUN [RUN ...] [to=FILE]"
NAMES_SHOWN = 3  # Maximum number of run names in a file name.


def render(runs: Sequence[RunSource], *, title: str) -> str:
    """Return the page over runs that were read completely."""
    answers: dict[str, Any] = {"api/runs": [run.summary() for run in runs]}
    for run in runs:
        answers |= _answers(run, max_bytes=MAX_EPISODES_BYTES // len(runs))
    answers["api/compare"] = compare(runs)
    # A "<" in a run's text must not end the element.
    content = json.dumps(answers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    styles = "".join(_text(path) for path in ("vendor/uPlot.min.css", "style.css"))
    modules = {path.name: _module(path) for path in sorted(STATIC.glob("*.js"))}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<title>{html_text(title)}</title><link rel="icon" href="data:,">'
        f"<style>{styles}</style></head>{_body()}"
        f'<script type="application/json" id="answers">{content}</script>'
        f"<script>{_text('vendor/uPlot.iife.min.js')}</script>"
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>'
        '<script type="module">import "main.js";</script></html>\n'
    )


def _answers(run: RunSource, *, max_bytes: int) -> dict[str, Any]:
    """Return the server's answers about a run, by request path."""
    path = f"api/run/{quote(run.name, safe=AS_IN_SCRIPTS)}"
    shown = overview(run)
    drawn = drawn_names(run.metrics.columns)
    answers = {
        path: shown,
        f"{path}/metrics": run.metrics.series(drawn),
        f"{path}/fleet": fleet(run),
    }
    rows: list[dict[str, Any]] = []
    for row in samples(run.rows):
        try:
            episode = run.episode(row["id"])
        except WireError as error:
            shown["problems"].append(f"{row['id']}: {error}")
            continue
        max_bytes -= len(json.dumps(episode["segments"]))
        if max_bytes > 0:
            rows.append(row)
            answers[f"{path}/episode?id={row['id']}"] = episode
    return {**answers, f"{path}/episodes": {"rows": rows}}


def _text(name: str) -> str:
    """Return a file of the dashboard's page."""
    return (STATIC / name).read_text(encoding="utf-8")


def _body() -> str:
    """Return the body of the dashboard's page."""
    return "<body>" + _text("index.html").partition("<body>")[2].rpartition("</html>")[0]


def _module(path: Path) -> str:
    """Return a script as a data URL; its imports resolve through the page's import map."""
    source = _IMPORT.sub(r'"\1"', path.read_text(encoding="utf-8"))
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def report(request: ParsedCommand) -> int:
    """Write the page of one run, or of several side by side; return the exit code.

    Raises: ConfigError: no such run or option, or the file cannot be written.
    """
    words = [word for word in request.overrides if "=" not in word]
    options = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    if unknown := sorted(options.keys() - {"to", "run.dir"}):
        raise ConfigError(f"{unknown[0]}: unknown option. Usage: run.py {USAGE}")
    if not words or len({*words}) < len(words):
        raise ConfigError(
            f"report: expects one run, or several different runs. Usage: run.py {USAGE}"
        )
    folder = ROOT / options.get("run.dir", "runs")
    runs = [read_run(word, runs=folder) for word in words]
    names = [run.name for run in runs]
    if len({*names}) < len(names):
        remedy = "Rename a folder, or write separate reports."
        raise ConfigError(f"{', '.join(names)}: two of the runs have the same name. {remedy}")
    for run in runs:
        for problem in run.problems():
            print(f"note: {plain(problem)}")
        for line in length_lines(run):
            print(line)
    path = Path(options.get("to") or _path(runs, folder))
    try:
        write_atomically(path, render(runs, title=title_of(names)))
    except OSError as error:
        raise ConfigError(f"to={path}: the file cannot be written ({error.strerror})") from error
    print(f"report: {path}")
    return 0


def read_run(word: str, *, runs: Path) -> RunSource:
    """Return a run after reading it completely. Raises: ConfigError: there is none."""
    source = open_source(word, runs=runs)
    if not isinstance(source, RunSource):
        raise ConfigError(f"{word}: a conversation file has no report. Use `run.py show`.")
    while source.refresh(budget_s=1.0):
        pass
    return source


def length_lines(run: RunSource) -> list[str]:
    """Return a table of the dropped episodes and tokens by length; no lines without a drop."""
    rows: list[dict[str, Any]] = json_object(run.run_dir.selection).get("lengths", [])
    if not any(row["dropped_frac"] or row["dropped_tokens_frac"] for row in rows):
        return []
    titles = ("sampled tokens", "episodes", "dropped", "tokens", "stale tokens", "dropped tokens")
    lines = [f"{plain(run.name)}: dropped as stale or failed, by the length of the episode"]
    lines.append("".join(f"{title:>16}" for title in titles))
    for row in rows:
        cells = (
            row["tokens"],
            f"{row['num']:,}",
            f"{row['dropped_frac']:.1%}",
            f"{row['sampled_tokens']:,}",
            f"{row['stale_tokens']:,}",
            f"{row['dropped_tokens_frac']:.1%}",
        )
        lines.append("".join(f"{plain(cell):>16}" for cell in cells))
    return lines


def title_of(names: Sequence[str]) -> str:
    """Return the title of a page over runs."""
    return f"{' and '.join(names)} · Longstride"


def _path(runs: Sequence[RunSource], folder: Path) -> Path:
    """Return the path of the page: in the run's folder, or beside the runs for several."""
    if len(runs) == 1:
        return runs[0].path / "report.html"
    names = "-".join(run.name for run in runs[:NAMES_SHOWN])
    return folder / f"report-{names}{'-and-more' * (len(runs) > NAMES_SHOWN)}.html"
