"""Every metric to Weights & Biases: online where the user is logged in, else offline, never asking.

wandb is imported when a run opens, because it takes a second. Nothing it does may end a run.
"""

import dataclasses
import logging
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.config.load import without_secrets
from common.config.run_config import LogSection, RunConfig, WandbMode
from common.store.run_dir import RunDir, write_atomically

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 30.0
_DEFAULT_URL = "https://api.wandb.ai"


class WandbSink:
    """A `MetricsSink`. Its files lie below the run directory; a resumed run keeps its wandb id."""

    def __init__(self, run_dir: RunDir, cfg: RunConfig, *, init_timeout_s: float = 20.0) -> None:
        """Open the run. With a wandb that does not answer in time it goes on offline."""
        self._init_timeout_s = init_timeout_s
        self.mode = choose_mode(cfg.log, os.environ)
        self._run: wandb.Run | None = None
        if self.mode is not WandbMode.DISABLED and not self._try_open(run_dir, cfg):
            was_online = self.mode is WandbMode.ONLINE
            self.mode = WandbMode.OFFLINE
            if not was_online or not self._try_open(run_dir, cfg):
                self.mode = WandbMode.DISABLED

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step over; does nothing once wandb has failed."""
        run = self._run
        # An own step axis: wandb refuses to go back on its own when a run resumes earlier.
        if run is not None and not _try(lambda: run.log({**metrics, "step": step}), "log"):
            self._run = None

    def close(self) -> None:
        """Finish the upload within `FINISH_TIMEOUT_S`; what is left can be sent by `wandb sync`."""
        if self._run is not None:
            _try(self._run.finish, "finish")
        self._run = None

    def _try_open(self, run_dir: RunDir, cfg: RunConfig) -> bool:
        if not _try(lambda: self._open(run_dir, cfg), f"init mode={self.mode}"):
            self._run = None
            _try(_forget_failed_init, "teardown")
        return self._run is not None

    def _open(self, run_dir: RunDir, cfg: RunConfig) -> None:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_SILENT"] = "true"  # read at import, before any settings object exists
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=self._init_timeout_s,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        kept = run_dir.root / "wandb_id"  # the same at every start in this run directory
        if not kept.exists():
            write_atomically(kept, secrets.token_hex(4))
        assert self.mode is not WandbMode.AUTO  # `choose_mode` has chosen
        self._run = wandb.init(
            project=cfg.log.wandb_project,
            name=cfg.run.name,
            id=kept.read_text().strip(),
            resume="allow" if self.mode is WandbMode.ONLINE else None,
            dir=str(run_dir.root),
            config=dataclasses.asdict(without_secrets(cfg)),
            mode=self.mode.value,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")


def _try(action: Callable[[], object], what: str) -> bool:
    """Do something with wandb; return whether it went well, with a warning where it did not."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - a metrics service must never end a run
        logger.warning("wandb failed, going on without it at=%s error=%s", what, error)
        return False
    return True


def choose_mode(cfg: LogSection, environ: Mapping[str, str]) -> WandbMode:
    """Return the mode to open: never AUTO, and ONLINE only with an account, so nothing can ask.

    WANDB_MODE, where set, decides for `auto`.
    """
    if cfg.wandb in (WandbMode.DISABLED, WandbMode.OFFLINE):
        return cfg.wandb
    wish = environ.get("WANDB_MODE", "") if cfg.wandb is WandbMode.AUTO else cfg.wandb.value
    if wish in (WandbMode.DISABLED, WandbMode.OFFLINE):
        return WandbMode(wish)
    if has_account(environ):
        return WandbMode.ONLINE
    if wish == WandbMode.ONLINE:
        logger.warning("log.wandb=online but nobody is logged in; run `wandb login`. going offline")
    return WandbMode.OFFLINE


def has_account(environ: Mapping[str, str]) -> bool:
    """Return whether wandb would find an API key in the environment or in the netrc file."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_URL).netloc
    home = Path(environ.get("HOME") or Path.home())
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None and entry[2]:
            return True
    return False


def _forget_failed_init() -> None:
    """Stop wandb's process, which else holds the run id of an attempt that timed out."""
    import wandb

    wandb.teardown(exit_code=1)
