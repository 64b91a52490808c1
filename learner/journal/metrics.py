"""Metrics of the run: one JSON object per step in metrics.jsonl, also sent to sinks."""

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from common.store.disk import AppendFile, if_room, with_room
from common.store.run_dir import RunDir, json_object, write_atomically

logger = logging.getLogger(__name__)

BEFORE_FIRST_STEP = -1
MAX_BYTES = 32 << 20  # About 9,000 steps. A larger file loses lines of its older half.
MetricsLine = dict[str, float | None]


class MetricsSink(Protocol):
    """A further receiver of every metric."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the finite metrics of one step."""
        ...

    def close(self) -> None:
        """Finish pending work. The caller is a thread of its own."""
        ...


class MetricsWriter:
    """The only writer of a run's metrics.jsonl. Every step appears in it once.

    Example: a run is killed at step 57 and resumes from the checkpoint of step 50. The lines of
    steps 51 to 57 move to metrics.discarded.jsonl. Step 51 is logged again, and `time_s` continues
    from its value at step 57.

    A file over MAX_BYTES loses every second line of its older half. This repeats, so the oldest
    steps are the sparsest. The first step and the newest ones stay.
    """

    def __init__(
        self,
        run_dir: RunDir,
        sinks: Sequence[MetricsSink],
        *,
        resumed_at_step: int = BEFORE_FIRST_STEP,
    ) -> None:
        """Open the file and discard the lines after `resumed_at_step`; by default all lines."""
        run_dir.root.mkdir(parents=True, exist_ok=True)
        self._sinks = list(sinks)
        self._last_step = resumed_at_step
        elapsed_s = _cut_after(run_dir.metrics, resumed_at_step)
        self._started_s = time.monotonic() - elapsed_s
        self._file = AppendFile(run_dir.metrics)

    @property
    def last_step(self) -> int:
        """Step of the last line, `BEFORE_FIRST_STEP` if the file has none."""
        return self._last_step

    def log(
        self, step: int, metrics: Mapping[str, float], *, check: Callable[[], object] = lambda: None
    ) -> None:
        """Write one step's metrics; a value that is not finite becomes null, with a warning.

        Args:
            step: must be larger than the step of every previous line.
            metrics: values by name, `area/thing_unit`. `step` and `time_s` are added.
            check: called during a wait for disk space; it may raise to end the wait.

        Raises: ValueError: the step is not larger than the last one.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} logged after step {self._last_step}")
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            lost = sorted(values.keys() - finite.keys())
            logger.warning("metrics are not finite step=%d names=%s", step, lost)
        elapsed_s = round(time.monotonic() - self._started_s, 3)
        line = {"step": step, "time_s": elapsed_s} | {name: finite.get(name) for name in values}
        text = json.dumps(line, allow_nan=False).encode() + b"\n"
        if self._file.size + len(text) > MAX_BYTES:
            self._thin()
        with_room(lambda: self._file.append([text]), self._file.path, check=check)
        self._last_step = step
        for sink in self._sinks:
            sink.log(step, finite)

    def _thin(self) -> None:
        """Remove lines of an old part of the file, and open the file again."""
        path = self._file.path
        if if_room(lambda: _thin(path), path):  # On a full disk the file is left as it is.
            self._file.close()
            self._file = AppendFile(path)

    def close(self) -> None:
        """Close the file, and all sinks at once: several silent ones take no longer than one."""
        self._file.close()
        with ThreadPoolExecutor(max(1, len(self._sinks))) as pool:
            for closed in [pool.submit(sink.close) for sink in self._sinks]:
                closed.result()


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return the steps in order, without a half-written last line. A missing file has no steps.

    Raises: ValueError: a complete line is not a JSON object; names file and line number.
    """
    return [line for line, _ in iter_metrics(path)]


def iter_metrics(path: Path) -> Iterator[tuple[MetricsLine, str]]:
    """Yield each line of `read_metrics` and its text. Holds one line in memory at a time."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as handle:
        for number, text in enumerate(handle, 1):
            # Text after the last newline is incomplete: a writer is active or has crashed.
            if text.endswith("\n") and text != "\n":
                yield _parse(text, f"{path}:{number}"), text


def tail_metrics(path: Path, *, num_steps: int, tail_bytes: int = 262144) -> list[MetricsLine]:
    """Return up to `num_steps` newest steps in order without reading the whole file.

    Reads at most the last `tail_bytes`. Invalid lines are skipped without an error, since the
    result is for displays.
    """
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - tail_bytes))
            texts = handle.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    lines: list[object] = []
    for text in texts[-num_steps:]:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # The first line may be cut by `tail_bytes`.
    return [cast(MetricsLine, line) for line in lines if isinstance(line, dict)]


def _parse(text: str, where: str) -> MetricsLine:
    """Return the metrics of a line. Raises: ValueError: it is no JSON object with a step."""
    try:
        line: object = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    parsed = cast(MetricsLine, line) if isinstance(line, dict) else {}
    if not isinstance(parsed.get("step"), int):
        raise ValueError(f"{where}: not a JSON object with a step")
    return parsed


def _thin(path: Path) -> None:
    """Remove every second line of the older half of a file. Its first line stays."""
    lines = path.read_bytes().splitlines(keepends=True)
    num_bytes = 0
    num_old = 0
    half = path.stat().st_size // 2
    while num_bytes < half:
        num_bytes += len(lines[num_old])
        num_old += 1
    thinned = [*lines[:num_old:2], *lines[num_old:]]
    write_atomically(path, b"".join(thinned).decode())
    logger.info("thinned metrics lines=%d to=%d file=%s", len(lines), len(thinned), path)


def _torn_line(path: Path) -> str:
    """Return the text after the last newline."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as handle:
        last = "".join(deque(handle, maxlen=1))
    return "" if last.endswith("\n") else last


def _cut_after(path: Path, step: int) -> float:
    """Move later and torn lines to another file; return the duration of the run until its end."""
    if not path.exists():
        return 0.0
    elapsed_s = 0.0
    earlier: list[str] = []
    cut: list[str] = []
    for line, text in iter_metrics(path):
        elapsed_s = max(elapsed_s, line.get("time_s") or 0.0)
        (cut if (line["step"] or 0.0) > step else earlier).append(text)
    if torn := _torn_line(path):
        cut.append(f"{torn}\n")
    if cut:
        discarded = path.with_name("metrics.discarded.jsonl")
        is_full = discarded.exists() and discarded.stat().st_size > MAX_BYTES
        with discarded.open("w" if is_full else "a", encoding="utf-8") as handle:
            handle.writelines(cut)
        write_atomically(path, "".join(earlier))
        logger.info("discarded metrics lines=%d after_step=%d file=%s", len(cut), step, discarded)
    return 0.0 if step == BEFORE_FIRST_STEP else elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """How far the copy of a run is behind the run."""

    lag_bytes: float  # Acknowledged bytes of the journal that the copy lacks.
    age_s: float  # Seconds since the newest whole copy, or since the first attempt.
    failing_s: float = 0.0  # Seconds since the store began to fail; 0: it works.
    checkpoint: float = -1.0  # Newest version of a checkpoint in the copy; -1: none.


def copy_state(run_dir: RunDir, *, now: float | None = None) -> CopyState | None:
    """Return the state of a run's copy; None if the run makes none now. `now` is the Unix time."""
    state = json_object(run_dir.root / "copies.json")
    numbers = {key: value for key, value in state.items() if isinstance(value, int | float)}
    if "copied_at" not in numbers or state.get("is_running") is False:
        return None
    now = time.time() if now is None else now
    failing_since = numbers.get("failing_since", 0.0)
    return CopyState(
        lag_bytes=numbers.get("lag_bytes", 0.0),
        age_s=max(0.0, now - numbers["copied_at"]),
        failing_s=max(0.0, now - failing_since) if failing_since else 0.0,
        checkpoint=numbers.get("checkpoint", -1.0),
    )


def copy_metrics(run_dir: RunDir) -> dict[str, float]:
    """Return the metrics of a step about the run's copy; {} if the run makes none."""
    state = copy_state(run_dir)
    if state is None:
        return {}
    return {
        "copy/lag_bytes": state.lag_bytes,
        "copy/age_s": state.age_s,
        "copy/failing_s": state.failing_s,
        "copy/checkpoint_version": state.checkpoint,
    }
