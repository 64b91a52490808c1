"""The folder or URL that holds the copy of a run, checked before the run starts."""

import re
from typing import Any
from urllib.parse import urlsplit

from common.errors import ConfigError

KEY = "journal.copy_to"


def open_target(url: str, *, key: str = KEY) -> tuple[Any, str]:
    """Return the file system of a folder or URL, and the path in it. It makes no request.

    Credentials are read by the backend from its own environment variables and files.

    Raises: ConfigError: the URL has a password, its scheme is unknown, or the package of its
        backend is not installed.
    """
    # Imported here, because few runs make a copy.
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    backends: Any = fsspec
    scheme = urlsplit(url).scheme or "file"
    shown = _shown(url)
    if shown != url:
        raise ConfigError(
            f"{key}={shown}: must contain no password. The backend of {scheme} reads credentials"
            " from its environment variables and its own files"
        )
    try:
        backends.get_filesystem_class(scheme)
        return backends.url_to_fs(url)
    except ImportError as error:
        text = f"{error}".rstrip(".")
        raise ConfigError(f"{key}={shown}: its backend is not installed ({text})") from error
    except ValueError as error:
        raise ConfigError(f"{key}={shown}: not a usable folder or URL ({error})") from error


def check_target(url: str) -> None:
    """Check that another process can copy a run to a folder or URL. Raises: ConfigError."""
    open_target(url)
    if urlsplit(url).scheme == "memory":
        raise ConfigError(f"{KEY}={url}: the memory of a process is lost at its end; name a folder")


def _shown(url: str) -> str:
    """Return the URL without its password."""
    return re.sub(r"(?<=://)([^/@:]*):[^/]*@", r"\1:hidden@", url)
