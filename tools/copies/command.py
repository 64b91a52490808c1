"""The actions `copy` and `fetch` of the command `journal`."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from common.config.knobs import FILE_NAME
from common.errors import ConfigError
from common.host.lock import hold_role
from common.log import configure_logging
from common.store.run_dir import RunDir
from tools.copies.copier import RunCopier, copy_all, run_copier
from tools.copies.fetch import fetch
from tools.copies.manifest import split_text

Echo = Callable[[str], None]
MIN_SLICE_S = 1.0  # Least seconds for checkpoints in one copy.
NO_LIMIT_S = 1e9
NICENESS = 10  # The run has priority.


def copy(run_dir: RunDir, options: Mapping[str, str], echo: Echo) -> int:
    """Copy a run once, or every `every_s` seconds until SIGTERM; return the exit code.

    Raises: ConfigError: an option is missing or wrong, or another process copies this run.
    """
    if "to" not in options:
        raise ConfigError("copy needs to=FOLDER or to=URL, such as to=s3://bucket/runs")
    every_s = _seconds(options.get("every_s", "0"))
    with hold_role(run_dir.root, "copies"):
        slice_s = max(MIN_SLICE_S, every_s) if every_s else NO_LIMIT_S
        copier = RunCopier(run_dir, options["to"], slice_s=slice_s)
        with closing(copier.store):
            if every_s:
                return _copy_until_stopped(copier, every_s)
            try:
                manifest = copy_all(copier)
            except OSError as error:
                echo(f"error: {run_dir.root} was not copied: {error}")
                return 1
            copier.state.is_running = False
            copier.write_state()
    size = f"{len(manifest.files)} files, {manifest.num_bytes / 1e6:.1f} MB"
    echo(f"copied {run_dir.root} to {copier.state.to}: {size}")
    if manifest.split_checkpoints:
        echo(f"the copy is not whole: {split_text(manifest.split_checkpoints)}")
    return 0


def _copy_until_stopped(copier: RunCopier, every_s: float) -> int:
    """Copy every few seconds until a signal, at low priority."""
    configure_logging("copies", "INFO")
    os.nice(NICENESS)
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return run_copier(copier, stop, every_s=every_s)


def fetch_run(url: str, options: Mapping[str, str], *, runs: Path, echo: Echo) -> int:
    """Restore a run from its copy; return the exit code: 1 if the store failed.

    Raises: ConfigError: there is no whole copy, or the run exists.
    """
    name = options.get("to", "")
    if name and not FILE_NAME.fits(name):
        raise ConfigError(f"to={name}: must be {FILE_NAME.phrase}")
    try:
        fetch(url, runs, name=name, echo=echo)
    except OSError as error:
        echo(f"error: {url} was not fetched: {error}")
        return 1
    return 0


def _seconds(text: str) -> float:
    """Return the value of `every_s`. Raises: ConfigError: it is no number, or too small."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value != 0 and not 0.1 <= value <= 86_400:
        raise ConfigError(f"every_s={text}: must be 0 or in [0.1, 86400]")
    return value
