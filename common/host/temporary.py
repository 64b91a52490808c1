"""The folder for temporary files: checked before the start, and with a short name.

The path of a Unix socket has at most 107 bytes, and the engine, Ray, browsers and multiprocessing
put their sockets below TMPDIR. Where its path is long, TMPDIR becomes a short link to it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from common.errors import ConfigError

MAX_SOCKET_BYTES = 107
LONGEST_BELOW_BYTES = 80  # Ray's: /ls-ray-xxxxxxxx/session_<date>_<pid>/sockets/plasma_store
MIN_FREE_BYTES = 16 << 20
SHORT_PLACES = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
OWNER = "LONGSTRIDE_TMP_OWNER"  # Environment variable: "<process id>:<folder>" of the link.


def check_temporary(environ: MutableMapping[str, str]) -> Path:
    """Return the folder for temporary files; makes TMPDIR absolute.

    Raises: ConfigError: TMPDIR names no folder that can be written, or there is none at all.
    """
    for name in ("TMPDIR", "TEMP", "TMP"):
        if named := environ.get(name):
            folder = Path(named).absolute()
            if problem := _problem(folder):
                raise ConfigError(
                    f"{name}={named}: {problem}; name a folder that can be written, or unset it"
                )
            environ["TMPDIR"] = str(folder)
            tempfile.tempdir = None  # It is found anew.
            return folder
    try:
        found = Path(tempfile.gettempdir())
    except FileNotFoundError:
        found = Path.cwd()
    if found == Path.cwd():  # The last place where Python looks.
        raise ConfigError("TMPDIR: neither /tmp nor /var/tmp can be written; name a folder by it")
    return found


def check_temporary_room(folder: Path | None = None) -> None:
    """Return if temporary files have room.

    Args:
        folder: where they lie; None: where this process puts them.

    Raises: ConfigError: the folder's disk is full.
    """
    folder = Path(os.path.realpath(folder or tempfile.gettempdir()))
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    is_without_inodes = found.f_files > 0 and found.f_favail == 0
    if free_bytes < MIN_FREE_BYTES or is_without_inodes:
        free_mb = free_bytes / 1e6
        raise ConfigError(
            f"TMPDIR={folder}: its disk is full ({free_mb:.0f} MB and {found.f_favail} files are"
            " left); make room, or name another folder"
        )


def shorten_temporary(
    environ: MutableMapping[str, str], places: Sequence[Path] = SHORT_PLACES
) -> None:
    """Let TMPDIR be a short link if libraries could not use its own path.

    The path may be too long for sockets, or hold a space, which compilers take for its end.

    Args:
        places: folders where the link may lie.

    Raises: ConfigError: the path is too long and no link can be made.
    """
    folder = check_temporary(environ)
    if fits_sockets(folder) and is_one_word(folder):
        return
    link = plain_link(folder, "t", environ, places)
    if link is None or not fits_sockets(link):
        raise ConfigError(
            f"TMPDIR={folder}: its path has {len(os.fsencode(folder))} bytes, and sockets below it"
            f" need one of at most {MAX_SOCKET_BYTES - LONGEST_BELOW_BYTES} without spaces; name"
            " another folder"
        )
    if is_one_word(folder):  # Compiled kernels outlive the link, and their cache keeps paths.
        user = environ.get("LOGNAME") or environ.get("USER") or str(os.getuid())
        environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / f"torchinductor_{user}"))
    environ["TMPDIR"] = str(link)
    tempfile.tempdir = None  # It is found anew.


def plain_link(
    folder: Path,
    name: str,
    environ: MutableMapping[str, str],
    places: Sequence[Path] = SHORT_PLACES,
) -> Path | None:
    """Return a link to a folder with a short path without spaces; None if none can be made.

    Links lie in a folder of this process alone, which is removed at its end.
    """
    own = take_over_links(environ)
    for place in places if own is None else ():
        with suppress(OSError):
            own = Path(tempfile.mkdtemp(prefix="ls", dir=place))  # 0700
            environ[OWNER] = f"{os.getpid()}:{own}"
            atexit.register(_remove, own, os.getpid())
            break
    if own is None:
        return None
    link = own / name
    link.symlink_to(folder)
    return link


def take_over_links(environ: MutableMapping[str, str]) -> Path | None:
    """Return the folder of links that this process made before it started its program again.

    It is removed at the end of this process. None: there is no such folder.
    """
    pid, _, own = environ.get(OWNER, "").partition(":")
    if not own or pid != str(os.getpid()):
        return None
    atexit.unregister(_remove)
    atexit.register(_remove, Path(own), os.getpid())
    return Path(own)


def is_one_word(folder: Path) -> bool:
    """Return whether a path holds no white space."""
    return len(str(folder).split()) == 1


def fits_sockets(folder: Path) -> bool:
    """Return whether the sockets of all libraries have paths below a folder that are allowed."""
    return len(os.fsencode(folder)) + LONGEST_BELOW_BYTES <= MAX_SOCKET_BYTES


def _remove(own: Path, pid: int) -> None:
    """Remove the link and its folder, unless this is a forked child of their process."""
    if os.getpid() == pid:
        shutil.rmtree(own, ignore_errors=True)  # A link is removed, not what it leads to.


def _problem(folder: Path) -> str:
    """Return why no temporary file can be made in a folder, "" if one can."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"longstride")
            file.flush()
    except OSError as error:
        return f"no file can be written there ({error.strerror})"
    return ""
