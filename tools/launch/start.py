"""Starts one role of a run in this process, on its machine or on one that joins."""

import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from common.config.load import load_received, override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError, NotStarted, PeerMissing
from common.host.machine import FOREIGN_TORCHVISION
from common.log import configure_logging
from common.repository import ROOT
from common.store.run_dir import RunDir
from tools.cli import requested
from tools.cli.command_line import ParsedCommand
from tools.launch.permanent_errors import REFUSED, TAKEN

logger = logging.getLogger(__name__)

# A restart may succeed after these errors, because their causes lie outside of the process.
OF_OTHERS = (EnvError, PeerMissing, TimeoutError, ConnectionError, MemoryError)
OF_THE_MACHINE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.EADDRINUSE,
)
# The installed libraries, or code of the user, do not fit the product.
OF_THE_CODE = (TypeError, AttributeError, NameError, NotImplementedError)
MAX_LINE_CHARS = 1_000


class StartGuard:
    """Classifies the errors of a role that has not begun by whether a restart may help.

    Example:
        with StartGuard(run_dir.root, has_begun=has_begun):
            run()   ImportError, TypeError -> ConfigError: the launcher ends the run at once
                    EngineError -> NotStarted: the run ends if the next start fails the same way
                    EnvError, out of memory -> unchanged: a restart
                    any error after the role has begun -> unchanged: see `permanent_error`
    """

    def __init__(self, folder: Path | None, *, has_begun: Callable[[], bool]) -> None:
        """Guard a role that writes to `folder`; None: the role joins from another machine."""
        self._folder = folder
        self._has_begun = has_begun

    def __enter__(self) -> "StartGuard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises: ConfigError, NotStarted: replace an error that came before the role had begun."""
        if not isinstance(error, Exception) or isinstance(error, ConfigError) or self._has_begun():
            return
        if isinstance(error, ImportError):
            logger.error("an import failed", exc_info=error)
            remedy = "run `make setup`, which installs the required versions"
            if _is_foreign_torchvision(error):
                remedy = FOREIGN_TORCHVISION
            raise ConfigError(f"{type(error).__name__}: {error}; {remedy}") from error
        is_refused = isinstance(error, RuntimeError) and REFUSED.search(str(error)) is not None
        if isinstance(error, OF_THE_CODE) or is_refused:
            logger.error("the code or a library's version is wrong", exc_info=error)
            remedy = "`python run.py doctor` compares the installed versions with the pinned ones"
            raise ConfigError(f"{one_line(error)}; {remedy}") from error
        if isinstance(error, FileNotFoundError) and self._is_foreign(error.filename):
            logger.error("a file is missing", exc_info=error)
            raise ConfigError(f"{error.filename}: no such file or directory") from error
        is_of_machine = getattr(error, "errno", None) in OF_THE_MACHINE  # Also ZeroMQ's errors.
        is_taken = TAKEN.search(one_line(error)) is not None
        if is_of_machine or is_taken or isinstance(error, OF_OTHERS):
            return
        raise NotStarted(one_line(error)) from error

    def _is_foreign(self, name: object) -> bool:
        """Return whether a file lies outside of the run's folder, where roles write files."""
        if not isinstance(name, str):
            return False
        return self._folder is None or not Path(name).absolute().is_relative_to(self._folder)


def _is_foreign_torchvision(error: BaseException | None) -> bool:
    """Return whether an error has this cause: torchvision lacks the operators of its torch."""
    while error is not None and "operator torchvision::" not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


def one_line(error: BaseException) -> str:
    """Return an error as one line that begins with its type, without quoted log lines."""
    text = " ".join(str(error).partition("; its last lines:")[0].split())
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_LINE_CHARS] if text else name


if TYPE_CHECKING:
    from common.join.enrol import Joined

WITH_MODEL = ("learner", "actor")  # Roles that read the folder `model.path`.


def run_role(request: ParsedCommand, run: Callable[[RunConfig, RunDir], None]) -> int:
    """Run one role in this process until it ends; return the exit code.

    With `--dry-run`, only print its configuration.

    Raises: ConfigError, NotStarted: the role failed before it began to work, see `StartGuard`.
    """
    from common.formats.chat_template import fix_prompts
    from common.stall.beacon import has_begun
    from common.store.run_start import dated, save_config
    from common.wire.security import create_keys
    from tools.checks.preflight import check_model
    from tools.dequantise.models import plain_models

    name = request.command
    cfg = requested.load_joined(request)
    if request.is_dry:
        return requested.show_config(cfg, name)
    run_dir = requested.directory_of(cfg)
    configure_logging(name, cfg.log.level)
    if name in WITH_MODEL:
        cfg = plain_models(cfg)
        check_model(cfg.model.path)
    if name == "scheduler":  # It begins a run, and the other roles join it.
        create_keys(run_dir.keys)
    if not run_dir.config.exists():
        cfg = dated(cfg, run_dir, is_kept=True)
        save_config(cfg, run_dir.config)
    fix_prompts(cfg.model)
    with StartGuard(run_dir.root, has_begun=has_begun):
        run(cfg, run_dir)
    return 0


def join_run(request: ParsedCommand, run: Callable[[RunConfig, "Joined"], None]) -> int:
    """Run a role of another machine's run in this process until it ends; return the exit code.

    Raises:
        ConfigError: the key, the address, the version or a key of the configuration is wrong.
        NotStarted: the role failed before it began to work, see `StartGuard`.
    """
    from common.formats.chat_template import fix_prompts
    from common.join.enrol import enrol, parse_address
    from common.repository import code_name, product_version
    from common.stall.beacon import has_begun
    from common.wire.addresses import host_of, is_here
    from common.wire.messages import JoinRequest
    from common.wire.security import read_join_key
    from scheduler.members.older_code import without_unknown
    from tools.checks.hub_models import resolve_models
    from tools.dequantise.models import plain_models

    role = request.command
    overrides = request.overrides
    address = parse_address(request.join or "")
    key = read_join_key(Path(request.key or ""), role=role)
    question = JoinRequest(
        role=role,
        product=product_version(),
        commit=code_name(),
        is_remote=not is_here(host_of(address)),
        has_model=override_value(overrides, "model.path") is not None,
        name=override_value(overrides, f"{role}.name") or _own_name(role),
    )
    configure_logging(role, "INFO")
    joined = enrol(address, key, question)
    config = without_unknown(joined.config, joined.defaults)
    cfg = load_received(config, _with_defaults(role, overrides, joined))
    if role != "learner":
        cfg = resolve_models(cfg)
    if role == "actor":
        cfg = plain_models(cfg)
        _check_weights(cfg, joined)
    configure_logging(role, cfg.log.level)
    requested.log_weights(cfg)
    fix_prompts(cfg.model)
    with StartGuard(None, has_begun=has_begun):
        run(cfg, joined)
    return 0


def _check_weights(cfg: RunConfig, joined: "Joined") -> None:
    """Check that an actor has the weights that the run does not send.

    Raises: ConfigError: the base model of the adapters or its own model folder is missing, or the
        dequantised weights differ from the run's.
    """
    from tools.checks.preflight import check_model
    from tools.dequantise.record import read_record

    rank = cfg.learner.lora.in_engine.rank
    if cfg.model.path != joined.model_path:
        check_model(cfg.model.path)
        weights = read_record(ROOT / cfg.model.path)
        of_run = read_record(Path(joined.model_path)) if joined.model_path else None
        if rank and weights and of_run and weights.sha256 != of_run.sha256:
            raise ConfigError(
                f"model.path={weights.source}: the dequantised weights ({weights.method}) differ"
                f" from those of the run, {of_run.source} ({of_run.method}). Copy the run's model"
                " to this machine, and install the same versions of the libraries"
            )
    elif rank:
        base = cfg.model.quantised or joined.base
        raise ConfigError(
            f"learner.lora.rank={rank}: this run sends only adapters, without their base model"
            f" {base}. Give model.path=FOLDER with a copy of the base model on this machine"
        )


def _own_name(role: str) -> str:
    """Return a name that no other process has."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _with_defaults(role: str, overrides: Sequence[str], joined: "Joined") -> list[str]:
    """Return the overrides plus a joining node's defaults for the keys that they do not set.

    The defaults are the folder of the received model and, for a hub, a reachable address.
    """
    if role == "learner":  # Its ranks use the run's own paths, or copies of these folders.
        return [*overrides]
    # The cache of this node, not that of the run's.
    defaults = {"model.path": joined.model_path or ".", "model.cache_folder": ""}
    if role == "actor" and joined.sends_adapters:
        # The base of the adapters, from this node's cache or from a shared disk.
        if joined.source:
            defaults["model.path"] = joined.source
        elif joined.quantised and Path(joined.quantised).exists():
            defaults["model.path"] = joined.quantised
    if role == "envhub":
        defaults["envhub.host"] = "0.0.0.0"
    added = [f"{key}={v}" for key, v in defaults.items() if override_value(overrides, key) is None]
    return [*overrides, *added]
