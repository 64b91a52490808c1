"""The command `report`: writes the page of one run, or one page that compares several runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.store.run_dir import write_atomically
from tools.cli.command_line import ParsedCommand
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.reading.sources import open_source
from tools.dashboard.words import plain
from tools.report.page import render

USAGE = "report RUN [RUN ...] [to=FILE]"
NAMES_SHOWN = 3  # Maximum number of run names in a file name.


def report(request: ParsedCommand, *, root: Path, echo: Callable[[str], None]) -> int:
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
    folder = root / options.get("run.dir", "runs")
    runs = [read_run(word, runs=folder) for word in words]
    names = [run.name for run in runs]
    if len({*names}) < len(names):
        remedy = "Rename a folder, or write separate reports."
        raise ConfigError(f"{', '.join(names)}: two of the runs have the same name. {remedy}")
    for run in runs:
        for problem in run.problems():
            echo(f"note: {plain(problem)}")
    path = Path(options.get("to") or _path(runs, folder))
    try:
        write_atomically(path, render(runs, title=title_of(names)))
    except OSError as error:
        raise ConfigError(f"to={path}: the file cannot be written ({error.strerror})") from error
    echo(f"report: {path}")
    return 0


def read_run(word: str, *, runs: Path) -> RunSource:
    """Return a run after reading it completely. Raises: ConfigError: there is none."""
    source = open_source(word, runs=runs)
    if not isinstance(source, RunSource):
        raise ConfigError(f"{word}: a conversation file has no report. Use `run.py show`.")
    while source.refresh(budget_s=1.0):
        pass
    return source


def title_of(names: Sequence[str]) -> str:
    """Return the title of a page over runs."""
    return f"{' and '.join(names)} · Longstride"


def _path(runs: Sequence[RunSource], folder: Path) -> Path:
    """Return the path of the page: in the run's folder, or beside the runs for several."""
    if len(runs) == 1:
        return runs[0].path / "report.html"
    names = "-".join(run.name for run in runs[:NAMES_SHOWN])
    return folder / f"report-{names}{'-and-more' * (len(runs) > NAMES_SHOWN)}.html"
