"""Logging of a role: one line per event, to the terminal's stderr or the role's log file."""

import contextlib
import logging
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from common.repository import with_program_name
from common.text import log_text

FORMAT = "%(asctime)s %(levelname).1s {role} %(name)s: %(message)s"


class PlainFormatter(logging.Formatter):
    """Removes control characters from records: texts of a policy cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text without control characters."""
        return log_text(with_program_name(super().format(record)))


def configure_logging(role: str, level: str) -> None:
    """Send this process's log to stderr, which the launcher redirects to `logs/<role>.log`.

    Verbose libraries log from level WARNING on.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(FORMAT.format(role=role)))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("asyncio", "aiohttp", "httpx", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # transformers imports torchao. torchao warns about missing CUDA kernels and torch's changes.
    for warning in ("torchao", "torch.utils._pytree"):
        logging.getLogger(warning).setLevel(logging.ERROR)
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@contextlib.contextmanager
def kept_in(path: Path, *names: str) -> Generator[None]:
    """Append the records of these loggers to a file as well. A full disk raises no error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.handleError = lambda record: None  # The terminal's log holds the record, too.
    root = logging.getLogger()
    handler.setFormatter(root.handlers[0].formatter if root.handlers else None)
    loggers = [logging.getLogger(name) for name in names]
    for named in loggers:
        named.addHandler(handler)
    try:
        yield
    finally:
        for named in loggers:
            named.removeHandler(handler)
        handler.close()


def rotate_logs(logs: Path, *, max_bytes: int) -> None:
    """Move the content of each log above `max_bytes` to `<role>.log.1`, and empty the log.

    The roles keep the file open and append to it, so it is copied and then truncated. Lines that
    are written between the two steps are lost.

    Raises: OSError: there is no room for the copy; the log is unchanged.
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
