"""Sends every metric to Weights & Biases: online if the user is logged in, otherwise offline.

It never prompts. A section of wandb is the area in a metric's name. Metrics of the dashboard's
charts have a panel, the rest are hidden until the user adds one. An evaluation is sent when it has
ended, with a table of sampled episodes from the journal. wandb is imported when a run opens,
because the import takes a second. An error of wandb never ends a run.
"""

import dataclasses
import json
import logging
import math
import netrc
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common.config.load import without_secrets
from common.config.log import LogSection, WandbMode
from common.config.run_config import RunConfig
from common.errors import ConfigError, WireError
from common.store.run_dir import RunDir, as_map, write_atomically
from common.text import plain
from learner.journal.index import EpisodeIndex
from learner.journal.texts import Texts, TokenIdDecoder, segments_of, texts_of_run
from learner.views import charts, evaluations, samples

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

_DEFAULT_URL = "https://api.wandb.ai"
MODES = {  # Values of WANDB_MODE that wandb accepts, case-insensitive.
    "": None,
    "online": WandbMode.ONLINE,
    "run": WandbMode.ONLINE,
    "shared": WandbMode.ONLINE,
    "offline": WandbMode.OFFLINE,
    "dryrun": WandbMode.OFFLINE,
    "disabled": WandbMode.DISABLED,
}
YES = ("true", "1", "yes", "on", "y", "t")
NO = ("", "false", "0", "no", "off", "n", "f")
FINISH_TIMEOUT_S = 30.0
READ_S = 30.0  # Maximum seconds of reading the journal for evaluations.
# Seconds of reading and of pausing during training.
READ_AT_ONCE_S = 0.05
PAUSE_S = 0.1
BEFORE = "before"  # Evaluations before training, which have ended at the first logged step.
COLUMNS = ("why", "subset", "item", "reward", "turns", "end", "text")  # Columns of episode tables.
DRAWN = ("eval/", "samples/")
MAX_ROWS = 30  # Maximum rows of an episode table.
MAX_CHARS = 8000  # Maximum length of an episode's text in a table.


def choose_mode(cfg: LogSection, environ: Mapping[str, str]) -> WandbMode:
    """Return the mode to open: never AUTO, and ONLINE only with an account.

    wandb therefore never prompts for a login. WANDB_MODE and WANDB_DISABLED decide for `auto`.

    Raises: ConfigError: one of these variables has an unknown value; names it.
    """
    requested = _requested_mode(environ) if cfg.wandb is WandbMode.AUTO else cfg.wandb
    if requested is WandbMode.DISABLED or requested is WandbMode.OFFLINE:
        return requested
    if has_account(environ):
        return WandbMode.ONLINE
    if requested is WandbMode.ONLINE:
        logger.warning("wandb is offline: no account is logged in. Run `wandb login` to go online")
    return WandbMode.OFFLINE


def check_mode(cfg: LogSection, environ: Mapping[str, str]) -> None:
    """Check the variables of the environment. Raises: ConfigError: as in `choose_mode`."""
    if cfg.wandb is WandbMode.AUTO:
        _requested_mode(environ)


def _requested_mode(environ: Mapping[str, str]) -> WandbMode | None:
    """Return the mode that the environment requests, None if it has no request.

    Raises: ConfigError.
    """
    is_off = environ.get("WANDB_DISABLED", "")
    if is_off.strip().lower() in YES:
        return WandbMode.DISABLED
    if is_off.strip().lower() not in NO:
        raise ConfigError(f"WANDB_DISABLED={is_off}: must be true or false, or unset")
    named = environ.get("WANDB_MODE", "")
    if named.strip().lower() not in MODES:
        modes = ", ".join(name for name in MODES if name)
        raise ConfigError(f"WANDB_MODE={named}: must be one of {modes}, or unset")
    return MODES[named.strip().lower()]


def has_account(environ: Mapping[str, str]) -> bool:
    """Return whether wandb would find an API key in the environment or in the netrc file."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_URL).netloc
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if entry is not None and entry[2]:
            return True
    return False


class WandbSink:
    """A `MetricsSink`. Its files are in the run directory, and a resumed run keeps its wandb id."""

    def __init__(
        self, run_dir: RunDir, cfg: RunConfig, *, job: str = "", init_timeout_s: float = 20.0
    ) -> None:
        """Open the run in wandb. The sink changes to offline mode if wandb does not answer in time.

        Args:
            job: "" for training. The job of another command is a separate run in wandb, with its
                metrics only.
        """
        self._run_dir = run_dir
        self._job = job
        self._defined: set[str] = set()
        self._index = EpisodeIndex(run_dir.journal)
        self._model = cfg.model.path
        self._texts: Texts | None = None
        self._seen_ended: set[str] = set()  # Evaluations that had ended at an earlier step.
        self._sent: set[str] = set()  # Evaluations whose scores were sent.
        self._telling: threading.Thread | None = None
        self._sending = threading.Lock()  # Serializes steps with evaluations of the other thread.
        self._init_timeout_s = init_timeout_s
        self.mode = choose_mode(cfg.log, os.environ)
        self._run: wandb.Run | None = None
        if self.mode is not WandbMode.DISABLED and not self._try_open(run_dir, cfg):
            was_online = self.mode is WandbMode.ONLINE
            self.mode = WandbMode.OFFLINE
            if not was_online or not self._try_open(run_dir, cfg):
                self.mode = WandbMode.DISABLED

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step. After an error of wandb it does nothing."""
        self._send(step, metrics, "log")
        is_telling = self._telling is not None and self._telling.is_alive()
        if self._run is None or self._job or is_telling:
            return
        if ended := self._ended() - self._seen_ended:
            tell = partial(
                _try, partial(self._send_evaluations, ended, pause_s=PAUSE_S), "evaluation"
            )
            self._telling = threading.Thread(target=tell, name="wandb evaluation", daemon=True)
            self._telling.start()

    def _ended(self) -> set[str]:
        """Return the evaluations that have ended, before training and during training."""
        try:
            lines = (self._run_dir.root / "eval.jsonl").read_text(encoding="utf-8").splitlines()
            beside = [str(as_map(json.loads(line)).get("group_id")) for line in lines]
        except (OSError, ValueError):
            beside = []
        return {BEFORE, *(each.removeprefix("eval-") for each in beside)}

    def _send(self, step: int, values: Mapping[str, Any], what: str) -> None:
        """Send values of a step. After an error of wandb, nothing more is sent."""
        run = self._run
        if run is None:
            return
        finite = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}

        def send() -> None:
            with self._sending:
                self._hide(run, finite)
                # A separate step axis, since wandb's own step cannot decrease when a run resumes.
                run.log({**finite, "step": step})

        if not _try(send, what):
            self._run = None

    def _hide(self, run: "wandb.Run", values: Mapping[str, Any]) -> None:
        """Hide metrics that have no chart in the dashboard."""
        if self._job:
            return
        new = values.keys() - self._defined
        charted = {name for chart in charts(dict.fromkeys(new)) for name in chart["series"]}
        for name in new - charted:
            hidden = not name.startswith(DRAWN)
            run.define_metric(name, step_metric="step", hidden=hidden)
        self._defined |= new

    def close(self) -> None:
        """Finish the upload within `FINISH_TIMEOUT_S`. `wandb sync` can upload a remaining part."""
        if self._telling is not None:
            self._telling.join(READ_S)
        if self._run is not None and not self._job:
            _try(self._send_evaluations, "evaluations")
        if self._run is not None:
            _try(self._run.finish, "finish")
        self._run = None

    def _send_evaluations(self, ended: Set[str] | None = None, *, pause_s: float = 0.0) -> None:
        """Send evaluations from the journal: scores over steps, tables of episodes.

        Args:
            ended: names of the evaluations to send; None: all that were not sent.
            pause_s: pause after each read of the journal, which leaves the GIL to training.
        """
        import wandb

        until = time.monotonic() + READ_S
        while self._index.refresh(budget_s=READ_AT_ONCE_S) and time.monotonic() < until:
            time.sleep(pause_s)
        self._seen_ended |= ended or set()
        by_name = evaluations(self._index.rows)
        for name, scored in sorted(by_name.items(), key=lambda item: item[1]["version"]):
            is_now = ended is None or name in ended or (BEFORE in ended and name.startswith(BEFORE))
            if not scored["num"] or not is_now or name in self._sent:
                continue
            self._sent.add(name)
            values: dict[str, Any] = dict(evaluation_scores(name, scored))
            rows = samples(self._index.rows, group=f"eval-{name}")[:MAX_ROWS]
            cells = [[*(row[column] for column in COLUMNS[:-1]), self._text(row)] for row in rows]
            values[f"samples/{name}"] = wandb.Table(columns=list(COLUMNS), data=cells)
            self._send(scored["version"], values, "evaluation")

    def _text(self, row: Mapping[str, Any]) -> str:
        """Return the text of an episode; that of a damaged one is its error."""
        if self._texts is None:
            try:
                self._texts = texts_of_run(self._run_dir.tokenizer, self._model)
            except ConfigError as error:
                logger.warning("wandb shows episodes as token ids: %s", error)
                self._texts = TokenIdDecoder()
        try:
            trajectory = self._index.open(self._index.rows.row_of[row["id"]])
        except WireError as error:
            return f"The record is damaged: {error}"[:MAX_CHARS]
        parts = segments_of(trajectory, self._texts)
        text = "\n".join(f"[{part['kind']}] {''.join(part['texts'])}" for part in parts)
        return plain(text)[:MAX_CHARS]

    def _try_open(self, run_dir: RunDir, cfg: RunConfig) -> bool:
        """Open the run in wandb; return whether that worked."""
        if not _try(lambda: self._open(run_dir, cfg), f"init mode={self.mode}"):
            self._run = None
            _try(_forget_failed_init, "teardown")
        return self._run is not None

    def _open(self, run_dir: RunDir, cfg: RunConfig) -> None:
        """Open the run in wandb with this configuration."""
        run_dir.root.mkdir(parents=True, exist_ok=True)
        # wandb reads both variables at import. It rejects spellings of the mode that `choose_mode`
        # accepts.
        os.environ["WANDB_SILENT"] = "true"
        os.environ["WANDB_MODE"] = self.mode.value
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=self._init_timeout_s,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        job = f"-{self._job}" if self._job else ""
        id_path = run_dir.root / f"wandb_id{job}"  # Keeps the id over all starts in this directory.
        if not id_path.exists():
            write_atomically(id_path, secrets.token_hex(4))
        assert self.mode is not WandbMode.AUTO  # `choose_mode` never returns AUTO.
        self._run = wandb.init(
            project=cfg.log.wandb_project,
            name=title_of(run_dir, cfg, self._job),
            id=id_path.read_text(encoding="utf-8").strip(),
            resume="allow" if self.mode is WandbMode.ONLINE else None,
            dir=str(run_dir.root),
            config=dataclasses.asdict(without_secrets(cfg)),
            mode=self.mode.value,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")


def title_of(run_dir: RunDir, cfg: RunConfig, job: str) -> str:
    """Return the title of a run in a tracker. The folder of another command is `NAME/JOB`."""
    return f"{run_dir.root.parent.name}-{job}" if job else cfg.run.name


def evaluation_scores(name: str, scored: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the scores of an evaluation by metric name. All those of the model share one curve."""
    policy = "eval" if name.endswith("-model") else f"eval/{name}"
    low, high = scored["ci95"]
    yield f"{policy}/success", scored["success"]
    yield f"{policy}/success_low", low
    yield f"{policy}/success_high", high
    for subset, part in scored["by_subset"].items():
        if part["num"]:
            yield f"{policy}/success/{subset}", part["success"]


def _try(action: Callable[[], object], what: str) -> bool:
    """Call a function of wandb; return False with a warning if it raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - a metrics service must never end a run
        logger.warning("wandb failed, the run continues without it at=%s error=%s", what, error)
        return False
    return True


def _forget_failed_init() -> None:
    """Stop wandb's process. After a timed-out attempt it would otherwise hold the run id."""
    import wandb

    wandb.teardown(exit_code=1)
