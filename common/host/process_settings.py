"""Process settings that libraries rely on: encoding, home, user, temporary folder.

Batch systems and containers do not always set them. The first process of a run completes them, and
its child processes inherit them.
"""

import locale
import logging
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from common.errors import ConfigError
from common.host.cgroups import cores_here, num_cores
from common.host.loopback import IPV6, loopback
from common.host.temporary import is_one_word, plain_link, shorten_temporary, take_over_links
from common.repository import note_working_directory

logger = logging.getLogger(__name__)

USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # `getpass.getuser` reads these.

THREADS = "OMP_NUM_THREADS"

# One thread per role, not pinned to a core, if the roles share the cores of one machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def start_with_plain_settings() -> None:
    """Start this program again if its locale or its path would break libraries.

    If the locale's encoding is not UTF-8, the program restarts in Python's UTF-8 mode: libraries
    open files without an explicit encoding, and arguments with umlauts would contain surrogates. If
    the path of the Python environment contains spaces, the program restarts through a link, because
    torch passes that path to the linker. Process id and arguments are kept.
    """
    take_over_links(os.environ)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    is_utf8 = sys.flags.utf8_mode or locale.getencoding().lower().replace("-", "") == "utf8"
    environ = dict(os.environ)
    python = _plain_python(environ)
    if not is_utf8:
        environ["PYTHONUTF8"] = "1"
    if python != sys.executable or environ.get("PYTHONUTF8") != os.environ.get("PYTHONUTF8"):
        os.execve(python, [python, *sys.orig_argv[1:]], environ)


def _plain_python(environ: MutableMapping[str, str]) -> str:
    """Return this interpreter's path, through a link if its environment's path has spaces."""
    prefix = Path(sys.prefix)
    if is_one_word(prefix) or not Path(sys.executable).is_relative_to(prefix):
        return sys.executable
    if (link := plain_link(prefix, "v", environ)) is None:
        return sys.executable
    return str(link / Path(sys.executable).relative_to(prefix))


def complete_process_settings(environ: MutableMapping[str, str]) -> None:
    """Complete the environment variables of this process and its child processes.

    Raises: ConfigError: there is no folder for temporary files; the message names the variable.
    """
    note_working_directory(environ)
    name_user(environ)
    shorten_temporary(environ)
    find_home(environ)
    # CUDA numbers GPUs by speed by default, and nvidia-smi numbers them by bus position.
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if loopback() == IPV6:  # gloo resolves the host name, which has an IPv4 address only.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if _has_quota():  # Libraries ignore a container's quota.
        environ.setdefault(THREADS, str(num_cores()))


def is_set_by_user(environ: MutableMapping[str, str]) -> bool:
    """Return whether OMP_NUM_THREADS is set, and not by `complete_process_settings`."""
    threads = environ.get(THREADS)
    return threads is not None and not (_has_quota() and threads == str(num_cores()))


def _has_quota() -> bool:
    return cores_here() < len(os.sched_getaffinity(0))


def name_user(environ: MutableMapping[str, str]) -> None:
    """Set a user name if neither the environment nor the system has one."""
    if any(environ.get(name) for name in USER_VARIABLES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["LOGNAME"] = f"uid{os.getuid()}"


def find_home(environ: MutableMapping[str, str]) -> None:
    """Set a writable home folder and writable cache folders for libraries.

    A read-only home folder remains the home; only the caches move.
    """
    named = environ.get("HOME") or _registered_home()
    home = Path(named)
    if home.is_absolute() and is_writable(home):
        environ["HOME"] = named
        return
    caches = private_folder()
    logger.warning("home folder is not writable home=%s caches=%s", named or "none", caches)
    if not (home.is_absolute() and os.access(home, os.R_OK | os.X_OK)):
        environ["HOME"] = str(caches)
    for name, folder in (
        ("XDG_CACHE_HOME", ".cache"),
        ("XDG_CONFIG_HOME", ".config"),
        ("XDG_DATA_HOME", ".local/share"),
        ("TRITON_HOME", "."),
    ):
        if not environ.get(name):
            environ[name] = str(caches / folder)


def _registered_home() -> str:
    """Return the home folder from the system's user table; "" for a user without an entry."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def cache_home() -> Path:
    """Return the user's folder for caches, which may not exist yet."""
    home = os.path.expanduser("~")
    usual = Path(home) if os.path.isabs(home) else private_folder()
    return Path(os.environ.get("XDG_CACHE_HOME") or usual / ".cache")


def check_caches() -> None:
    """Check that caches can be written. Raises: ConfigError: the cache folder is not writable."""
    folder = cache_home()
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not is_writable(above):
        raise ConfigError(
            f"XDG_CACHE_HOME={folder}: the folder is not writable, and compiled kernels are stored"
            " in it. Set another folder, or unset the variable"
        )


def is_writable(folder: Path) -> bool:
    """Return whether this process can make files in a folder, which must exist."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def private_folder(base: Path | None = None) -> Path:
    """Return a folder below the temporary folder that only this user can access.

    All processes of the user share it, so caches persist. If another user owns that name, a new
    folder is created.
    """
    base = base or Path(os.path.realpath(tempfile.gettempdir()))
    folder = base / f"longstride-home-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_own and not status.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="longstride-home-", dir=base))
