"""Sends every metric to the trackers of `log.to`: wandb, TensorBoard, MLflow, trackio, own ones.

Each tracker is called by its own library, in a thread of its own, so that a slow or silent server
delays no step. The first error of a tracker is logged, and the run continues without it. A resumed
run continues the same run of the tracker.
"""

import dataclasses
import inspect
import json
import logging
import os
import queue
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from common.config.load import without_secrets
from common.config.log import LogSection, TrackerName
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir, as_map, write_atomically
from common.user_code import ImportedFunction, load_function
from learner.journal.index import EpisodeIndex
from learner.journal.metrics import BEFORE_FIRST_STEP, MetricsSink
from learner.views import evaluations
from learner.wandb_sink import WandbSink, check_mode, evaluation_scores, title_of

logger = logging.getLogger(__name__)

LIBRARIES = {  # Module and package of each tracker.
    TrackerName.WANDB: ("wandb", "wandb"),
    TrackerName.TENSORBOARD: ("tensorboard", "tensorboard"),
    TrackerName.MLFLOW: ("mlflow", "mlflow"),
    TrackerName.TRACKIO: ("trackio", "trackio"),
}
METHODS = {"send": ("step", "values"), "close": ()}  # A tracker's methods, with their arguments.
MAX_WAITING = 1_000  # Steps that wait for a slow tracker. Further ones are left out.
CLOSE_S = 60.0
READ_S = 30.0  # Maximum seconds of reading the journal for evaluations.
MAX_PARAM_CHARS = 500  # Longest value of a configuration key in MLflow.
PARAMS_AT_ONCE = 100  # Most parameters of one request to MLflow.


class Tracker(Protocol):
    """A run in a tracker. Its methods may raise anything."""

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step; a step may come twice with different names."""
        ...

    def close(self) -> None:
        """Finish the run in the tracker."""
        ...


def check_trackers(
    cfg: RunConfig, environ: Mapping[str, str], *, find: Callable[[str], object] = find_spec
) -> None:
    """Check `log.to`. Raises: ConfigError: a library is missing, or as `check_mode`.

    Args:
        find: returns None for a module that is not installed.
    """
    for user in user_trackers(cfg.log):
        user.check_arguments("run_dir", "config")
        if inspect.isclass(user.function):
            _check_tracker(user, user.function, bound=("self",))
        else:
            _check_opened(user, cfg)
    for name in cfg.log.to:
        if ":" in name:
            continue
        module, package = LIBRARIES[TrackerName(name)]
        if find(module) is None:
            raise ConfigError(
                f"log.to=[{name}]: the package {package} is not installed. Install it with:"
                f" pip install {package}{' (the extra `trackers`)' * (name != TrackerName.WANDB)}"
            )
    if TrackerName.WANDB in cfg.log.to:
        check_mode(cfg.log, environ)


def user_trackers(cfg: LogSection) -> list[ImportedFunction]:
    """Return the trackers of the user in `log.to`. Raises: ConfigError: one cannot be loaded."""
    return [load_function("log.to", name) for name in cfg.to if ":" in name]


def _check_tracker(user: ImportedFunction, tracker: Any, *, bound: tuple[str, ...] = ()) -> None:
    """Check that a tracker of the user has the methods. Raises: ConfigError.

    Args:
        bound: arguments that an object passes to the methods of its class.
    """
    if missing := [name for name in METHODS if not callable(getattr(tracker, name, None))]:
        raise ConfigError(
            f"{user.where}: its tracker has no method {' and no method '.join(missing)}; expected"
            " send(step, values) and close()"
        )
    for name, arguments in METHODS.items():
        method = getattr(tracker, name)
        if inspect.iscoroutinefunction(method):
            raise ConfigError(
                f"{user.where}: {name} is asynchronous; write `def` in place of `async def`"
            )
        called = ImportedFunction(
            key=user.key, reference=f"{user.reference}.{name}", function=method, sha256=user.sha256
        )
        called.check_arguments(*bound, *arguments)


def _check_opened(user: ImportedFunction, cfg: RunConfig) -> None:
    """Open the tracker of a function for a folder that is removed, and close it.

    A service that cannot be reached stops no run, so an OSError is a warning.

    Raises: ConfigError: the function fails otherwise, or its tracker lacks a method.
    """
    with tempfile.TemporaryDirectory(prefix="longstride-") as folder:
        try:
            tracker = user.call(Path(folder), dict(_plain_config(cfg)))
            _check_tracker(user, tracker)
            replace(user, function=tracker.close).call()
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            logger.warning("%s; the run opens it again", error)


def _tracker_of_user(name: str, run_dir: RunDir, cfg: RunConfig) -> Tracker:
    """Return a tracker of the user, opened. Raises: ConfigError: it lacks a method."""
    user = load_function("log.to", name)
    tracker = user.call(run_dir.root, dict(_plain_config(cfg)))
    _check_tracker(user, tracker)
    return tracker


def open_trackers(
    run_dir: RunDir, cfg: RunConfig, *, job: str = "", resumed_at_step: int = BEFORE_FIRST_STEP
) -> list[MetricsSink]:
    """Return the sinks of `log.to`.

    Args:
        job: "" for training. The job of another command is a separate run in a tracker.
        resumed_at_step: last valid step; `BEFORE_FIRST_STEP` for a new run.
    """
    makers: dict[str, Callable[[], Tracker]] = {
        TrackerName.TENSORBOARD: lambda: TensorBoard(run_dir, job, resumed_at_step),
        TrackerName.MLFLOW: lambda: Mlflow(run_dir, cfg, job),
        TrackerName.TRACKIO: lambda: Trackio(run_dir, cfg, job),
    }
    sinks: list[MetricsSink] = []
    for name in dict.fromkeys(cfg.log.to):
        if name == TrackerName.WANDB:
            sinks.append(WandbSink(run_dir, cfg, job=job))
        else:
            make = makers.get(name) or partial(_tracker_of_user, name, run_dir, cfg)
            sinks.append(TrackerSink(name, make, run_dir, has_evaluations=not job))
    return sinks


class TrackerSink(threading.Thread):
    """A `MetricsSink` that opens and calls one tracker in its own thread.

    Consumes: steps, by `log`.
    Waits for: the tracker, without a limit. Training does not wait for it.
    Unblocked by: `close`, which waits for at most `CLOSE_S`.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run_dir: RunDir,
        *,
        has_evaluations: bool,
        close_s: float = CLOSE_S,
    ) -> None:
        """Start to open the tracker.

        Args:
            has_evaluations: send the scores of the run's evaluations, too.
        """
        super().__init__(name=f"tracker {name}", daemon=True)
        self._tracker_name = name
        self._make = make
        self._run_dir = run_dir
        self._has_evaluations = has_evaluations
        self._close_s = close_s
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_WAITING)
        self._sent_evaluations: set[int] = set()  # Steps of the evaluations that were sent.
        self._has_dropped = False
        self.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step."""
        try:
            self._waiting.put_nowait((step, dict(metrics)))
        except queue.Full:
            if not self._has_dropped and self.is_alive():
                self._has_dropped = True
                logger.warning(
                    "%s is slow: step %d and later ones are missing there until it catches up",
                    self._tracker_name,
                    step,
                )

    def close(self) -> None:
        """Send the queued steps and the evaluations, within `CLOSE_S`."""
        deadline_s = time.monotonic() + self._close_s
        while self.is_alive():  # The queue may be full.
            try:
                self._waiting.put(None, timeout=0.1)
                break
            except queue.Full:
                if time.monotonic() > deadline_s:
                    break
        self.join(max(0.0, deadline_s - time.monotonic()))
        if self.is_alive():
            logger.warning("%s did not finish in %g s", self._tracker_name, self._close_s)

    def run(self) -> None:
        """Send until closed, or until the first error."""
        at = "its start"
        try:
            tracker = self._make()
            while (entry := self._waiting.get()) is not None:
                step, values = entry
                at = f"step {step}"
                tracker.send(step, values)
                self._send_new_evaluations(tracker)
            at = "its end"
            self._send_last_evaluations(tracker)
            tracker.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker must never end a run
            logger.warning(
                "%s failed, the run continues without it at=%s error=%s: %s",
                self._tracker_name,
                at,
                type(error).__name__,
                error,
            )

    def _send_new_evaluations(self, tracker: Tracker) -> None:
        """Send the scores of the evaluations beside training that have ended."""
        path = self._run_dir.root / "eval.jsonl"
        if not self._has_evaluations or not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            values = as_map(json.loads(line))
            step = int(values["step"])
            if step not in self._sent_evaluations:
                self._sent_evaluations.add(step)
                names = ("eval/success", "eval/reward")
                scores = {n: float(values[n]) for n in names if values.get(n) is not None}
                tracker.send(step, scores)

    def _send_last_evaluations(self, tracker: Tracker) -> None:
        """Send the scores of the evaluations before and after training, from the journal."""
        if not self._has_evaluations:
            return
        self._send_new_evaluations(tracker)
        index = EpisodeIndex(self._run_dir.journal)
        until = time.monotonic() + READ_S
        while index.refresh(budget_s=0.05) and time.monotonic() < until:
            pass
        for name, scored in sorted(evaluations(index.rows).items()):
            if scored["num"] and not name.startswith("step-"):
                tracker.send(scored["version"], dict(evaluation_scores(name, scored)))


def _plain_config(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of the configuration with their values as text, without secrets."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from walk(f"{prefix}.{name}" if prefix else str(name), inner)
        else:
            yield prefix, str(value)

    yield from walk("", dataclasses.asdict(without_secrets(cfg)))


def _kept_id(path: Path, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id of a tracker's run in this run directory, and whether it is new."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip(), False
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    write_atomically(path, made)
    return made, True


class TensorBoard:
    """Event files in the folder `tensorboard` of the run directory."""

    def __init__(self, run_dir: RunDir, job: str, resumed_at_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir.root / "tensorboard" / job
        # TensorBoard hides the steps after the one at which a restart continues.
        purge = resumed_at_step + 1 if resumed_at_step > BEFORE_FIRST_STEP else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Mlflow:
    """A run in MLflow: at MLFLOW_TRACKING_URI, or in the file mlflow.db beside the runs."""

    def __init__(self, run_dir: RunDir, cfg: RunConfig, job: str) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        title = title_of(run_dir, cfg, job)
        runs = run_dir.root.resolve().parents[1 if job else 0]
        job = f"-{job}" if job else ""
        is_set = bool(os.environ.get("MLFLOW_TRACKING_URI"))
        here = f"sqlite:///{runs / 'mlflow.db'}"
        self._client = client = MlflowClient(None if is_set else here)
        name = cfg.log.wandb_project

        def create() -> str:
            experiment = client.get_experiment_by_name(name)
            identity = experiment.experiment_id if experiment else client.create_experiment(name)
            return client.create_run(identity, run_name=title).info.run_id

        path = run_dir.root / f"mlflow_id{job}"
        self._run_id, is_new = _kept_id(path, create)
        if not is_new:
            try:
                client.update_run(self._run_id, status="RUNNING")
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                # The run directory was copied to a machine without the file mlflow.db.
                logger.warning("mlflow has no run %s; a new one begins", self._run_id)
                path.unlink()
                self._run_id, _ = _kept_id(path, create)
        params = [Param(_key(k), v[:MAX_PARAM_CHARS]) for k, v in _plain_config(cfg)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(self._run_id, params=params[start : start + PARAMS_AT_ONCE])

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_key(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _key(name: str) -> str:
    """Return a name in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /:]", "_", name)


class Trackio:
    """A run in trackio, whose files are in TRACKIO_DIR or in trackio's own folder."""

    def __init__(self, run_dir: RunDir, cfg: RunConfig, job: str) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Runs of one name continue each other in trackio, so the name has an id.
        make = lambda: f"{title_of(run_dir, cfg, job)}-{secrets.token_hex(4)}"  # noqa: E731
        suffix = f"-{job}" if job else ""
        name, _ = _kept_id(run_dir.root / f"trackio_id{suffix}", make)
        self._run = trackio.init(
            project=cfg.log.wandb_project,
            name=name,
            config=dict(_plain_config(cfg)),
            resume="allow",
        )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
