"""What libraries expect of the process that they run in: encoding, home, user, temporary folder.

Batch systems and containers leave some of it out. A run's first process puts the rest right, and
the processes that it starts inherit it.
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
from common.host.cores import cores_here, num_cores
from common.host.loopback import IPV6, loopback
from common.host.temporary import is_one_word, plain_link, shorten_temporary, take_over_links

logger = logging.getLogger(__name__)

USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # As `getpass.getuser` reads them.


def start_with_plain_settings() -> None:
    """Start this program again if libraries could not work with how it was started.

    In Python's UTF-8 mode, if the locale has another encoding: libraries open files without naming
    one, and arguments with umlauts would hold surrogates. By a link to the Python environment, if
    its path holds spaces: torch passes it to the linker. Process id and arguments stay the same.
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
    """Return the path of this interpreter, by a link if that of its environment holds spaces."""
    prefix = Path(sys.prefix)
    if is_one_word(prefix) or not Path(sys.executable).is_relative_to(prefix):
        return sys.executable
    if (link := plain_link(prefix, "v", environ)) is None:
        return sys.executable
    return str(link / Path(sys.executable).relative_to(prefix))


def settle_surroundings(environ: MutableMapping[str, str]) -> None:
    """Complete the environment variables of this process and of those that it starts.

    Raises: ConfigError: there is no folder for temporary files; names the variable.
    """
    name_user(environ)
    shorten_temporary(environ)
    find_home(environ)
    # CUDA numbers GPUs by speed, nvidia-smi by their place on the bus.
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if loopback() == IPV6:  # gloo resolves the host's name, which IPv4 alone has.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cores_here() < len(os.sched_getaffinity(0)):  # Libraries see no quota of a container.
        environ.setdefault("OMP_NUM_THREADS", str(num_cores()))


def name_user(environ: MutableMapping[str, str]) -> None:
    """Name the user of this process if neither the environment nor the system does."""
    if any(environ.get(name) for name in USER_VARIABLES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["LOGNAME"] = f"uid{os.getuid()}"


def find_home(environ: MutableMapping[str, str]) -> None:
    """Give libraries a home folder, and folders for their caches, that can be written.

    A home that can only be read stays the home; just the caches move.
    """
    named = environ.get("HOME") or _registered_home()
    home = Path(named)
    if home.is_absolute() and is_writable(home):
        environ["HOME"] = named
        return
    own = private_folder()
    logger.warning("the home folder cannot be written home=%s caches=%s", named or "none", own)
    if not (home.is_absolute() and os.access(home, os.R_OK | os.X_OK)):
        environ["HOME"] = str(own)
    for name, folder in (
        ("XDG_CACHE_HOME", ".cache"),
        ("XDG_CONFIG_HOME", ".config"),
        ("XDG_DATA_HOME", ".local/share"),
        ("TRITON_HOME", "."),
    ):
        if not environ.get(name):
            environ[name] = str(own / folder)


def _registered_home() -> str:
    """Return the home folder of the system's user table, "" if the user is not in it."""
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
    """Return if caches can be written. Raises: ConfigError: XDG_CACHE_HOME names no such folder."""
    folder = cache_home()
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not is_writable(above):
        raise ConfigError(
            f"XDG_CACHE_HOME={folder}: it cannot be written, and compiled kernels are kept there;"
            " name another folder, or unset it"
        )


def is_writable(folder: Path) -> bool:
    """Return whether this process can make files in a folder, which must exist."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def private_folder(base: Path | None = None) -> Path:
    """Return a folder below the temporary one that only this user can use.

    It is the same one for all processes of the user, so that caches last. If another user has
    taken its name, the folder is a new one.
    """
    base = base or Path(os.path.realpath(tempfile.gettempdir()))
    own = base / f"longstride-home-{os.getuid()}"
    with suppress(FileExistsError):
        own.mkdir(mode=0o700)
    found = own.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if is_own and not found.st_mode & 0o077:
        return own
    return Path(tempfile.mkdtemp(prefix="longstride-home-", dir=base))
