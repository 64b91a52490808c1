"""Classification of errors that end a role's process before it has begun to work."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from common.errors import ConfigError, EnvError, NotStarted, PeerMissing
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


def one_line(error: BaseException) -> str:
    """Return an error as one line that begins with its type, without quoted log lines."""
    text = " ".join(str(error).partition("; its last lines:")[0].split())
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_LINE_CHARS] if text else name
