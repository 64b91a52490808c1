"""The folder for temporary files: checked before the start, and with a short path.

The path of a Unix socket has at most 107 bytes. The engine, Ray, browsers and multiprocessing place
their sockets below TMPDIR. If its path is long, TMPDIR is set to a short link to it.
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
LONGEST_BELOW_BYTES = 80  # Ray's path: /ls-ray-xxxxxxxx/session_<date>_<pid>/sockets/plasma_store.
MIN_FREE_BYTES = 16 << 20
SHORT_PLACES = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
OWNER = "LONGSTRIDE_TMP_OWNER"  # Environment variable: "<process id>:<folder>" of the link.


def check_temporary(environ: MutableMapping[str, str]) -> Path:
    """Return the folder for temporary files, and make TMPDIR absolute.

    Raises: ConfigError: TMPDIR is not a writable folder, or no writable folder exists.
    """
    for name in ("TMPDIR", "TEMP", "TMP"):
        if named := environ.get(name):
            folder = Path(named).absolute()
            if problem := _problem(folder):
                raise ConfigError(
                    f"{name}={named}: {problem}. Set a writable folder, or unset the variable"
                )
            environ["TMPDIR"] = str(folder)
            tempfile.tempdir = None  # Python computes it again.
            return folder
    try:
        default = Path(tempfile.gettempdir())
    except FileNotFoundError:
        default = Path.cwd()
    if default == Path.cwd():  # Python's last fallback.
        raise ConfigError("TMPDIR: neither /tmp nor /var/tmp is writable. Set a writable folder")
    return default


def check_temporary_room(folder: Path | None = None) -> None:
    """Check that the disk of temporary files has free space.

    Args:
        folder: folder of the temporary files; None: this process's own.

    Raises: ConfigError: the folder's disk is full.
    """
    folder = Path(os.path.realpath(folder or tempfile.gettempdir()))
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    is_without_inodes = disk.f_files > 0 and disk.f_favail == 0
    if free_bytes < MIN_FREE_BYTES or is_without_inodes:
        free_mb = free_bytes / 1e6
        raise ConfigError(
            f"TMPDIR={folder}: its disk is full ({free_mb:.0f} MB and {disk.f_favail} files are"
            " free). Free disk space, or set another folder"
        )


def shorten_temporary(
    environ: MutableMapping[str, str], places: Sequence[Path] = SHORT_PLACES
) -> None:
    """Set TMPDIR to a short link if libraries cannot use its own path.

    The path may be too long for sockets, or contain a space, at which compilers cut it off.

    Args:
        places: folders in which the link may be created.

    Raises: ConfigError: the path is too long and no link can be created.
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
    if is_one_word(folder):  # Compiled kernels outlive the link, and their cache stores paths.
        user = environ.get("LOGNAME") or environ.get("USER") or str(os.getuid())
        environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / f"torchinductor_{user}"))
    environ["TMPDIR"] = str(link)
    tempfile.tempdir = None  # Python computes it again.


def plain_link(
    folder: Path,
    name: str,
    environ: MutableMapping[str, str],
    places: Sequence[Path] = SHORT_PLACES,
) -> Path | None:
    """Return a link with a short path without spaces to a folder; None if that is impossible.

    The links lie in a folder of this process, which is removed at its exit.
    """
    links = take_over_links(environ)
    for place in places if links is None else ():
        with suppress(OSError):
            links = Path(tempfile.mkdtemp(prefix="ls", dir=place))  # The mode is 0700.
            environ[OWNER] = f"{os.getpid()}:{links}"
            atexit.register(_remove, links, os.getpid())
            break
    if links is None:
        return None
    link = links / name
    link.symlink_to(folder)
    return link


def take_over_links(environ: MutableMapping[str, str]) -> Path | None:
    """Return the folder of links that this process created before it restarted its program.

    The folder is removed at this process's exit. None: there is no such folder.
    """
    pid, _, folder = environ.get(OWNER, "").partition(":")
    if not folder or pid != str(os.getpid()):
        return None
    atexit.unregister(_remove)
    atexit.register(_remove, Path(folder), os.getpid())
    return Path(folder)


def is_one_word(folder: Path) -> bool:
    """Return whether a path holds no white space."""
    return len(str(folder).split()) == 1


def fits_sockets(folder: Path) -> bool:
    """Return whether the socket paths of all libraries below a folder are short enough."""
    return len(os.fsencode(folder)) + LONGEST_BELOW_BYTES <= MAX_SOCKET_BYTES


def _remove(folder: Path, pid: int) -> None:
    """Remove the links and their folder, unless this process is a fork of their creator."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)  # This removes links, not their targets.


def _problem(folder: Path) -> str:
    """Return why no temporary file can be created in a folder; "" if one can."""
    if not folder.is_dir():
        return "the folder does not exist"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"longstride")
            file.flush()
    except OSError as error:
        return f"the folder is not writable ({error.strerror})"
    return ""
