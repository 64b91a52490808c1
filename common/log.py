"""Logging of a role: one line per event, to the terminal's stderr or the role's log file."""

import contextlib
import logging
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from common.text import log_text

FORMAT = "%(asctime)s %(levelname).1s {role} %(name)s: %(message)s"


class PlainFormatter(logging.Formatter):
    """Formats records whose texts may be a policy's: no control character reaches a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text without control characters."""
        return log_text(super().format(record))


def configure_logging(role: str, level: str) -> None:
    """Send this process's log to stderr (the launcher points it at `logs/<role>.log`).

    Libraries that chat are held at WARNING.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(FORMAT.format(role=role)))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("asyncio", "aiohttp", "httpx", "urllib3", "matplotlib", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # transformers imports torchao, which warns of CUDA's kernels and of torch's own changes.
    for warning in ("torchao", "torch.utils._pytree"):
        logging.getLogger(warning).setLevel(logging.ERROR)
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@contextlib.contextmanager
def kept_in(path: Path, *names: str) -> Generator[None]:
    """Append what these loggers say to a file as well; that there is no room for it is no error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.handleError = lambda record: None  # the line stands in the terminal's log
    root = logging.getLogger()
    handler.setFormatter(root.handlers[0].formatter if root.handlers else None)
    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addHandler(handler)
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
        handler.close()


def begin_anew(logs: Path, *, max_bytes: int) -> None:
    """Keep each log that is larger aside as `<role>.log.1`, and let it begin anew.

    Its writers hold it open and append, so it is copied and cut; what they write in between those
    two is lost. Raises: OSError: there is no room for the copy; it stays as it is.
    """
    for path in logs.glob("*.log"):
        if path.stat().st_size > max_bytes:
            partial = path.with_name(f".{path.name}.partial")
            try:
                shutil.copyfile(path, partial)
                partial.replace(path.with_name(f"{path.name}.1"))
            except OSError:
                partial.unlink(missing_ok=True)
                raise
            os.truncate(path, 0)
