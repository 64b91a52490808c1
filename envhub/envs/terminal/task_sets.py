"""Sets of tasks: a folder, a file of instances, or a name of Harbor's registry."""

import fcntl
import logging
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.config.envs import TerminalOptions
from common.errors import ConfigError
from common.host.process_settings import cache_home
from common.user_code import find_path
from envhub.envs.terminal.instances import is_file_of_instances, load_instances
from envhub.envs.terminal.tasks import TerminalTask, is_task, load_tasks_of

logger = logging.getLogger(__name__)

SCHEME = "harbor:"
PROGRAM = "harbor"  # The command of the package, in an environment of its own.
NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)@(?P<version>[\w.+-]+)")
DOWNLOAD_TIMEOUT_S = 3600.0


def load_task_set(
    key: str, value: str, *, options: TerminalOptions, has_images: bool, has_containers: bool
) -> list[TerminalTask]:
    """Return the tasks of a folder, of a file of instances, or of `harbor:NAME@VERSION`.

    Args:
        key: the setting that named them.
        has_images, has_containers: see `load_tasks_of`.

    Raises: ConfigError: no task, or a task that cannot be played.
    """
    path = find_task_set(key, value, options)
    if is_file_of_instances(path):
        if not has_images:
            raise ConfigError(
                f"{key}={value}: its instances have images; set envs.sandbox.backend=docker or"
                " podman"
            )
        return load_instances(path, f"{key}={value}")
    return load_tasks_of(
        key,
        str(path),
        has_images=has_images,
        has_containers=has_containers,
        without_network=options.without_network,
        permits_network=options.network == "task",
    )


def find_task_set(key: str, value: str, options: TerminalOptions) -> Path:
    """Return the path of a set of tasks; one with a name is downloaded once.

    Raises: ConfigError: the name is malformed, or the set is absent and cannot be downloaded.
    """
    if not value.startswith(SCHEME):
        return find_path(key, value)
    match = NAME.fullmatch(value.removeprefix(SCHEME))
    if match is None or ".." in value:
        raise ConfigError(f"{key}={value}: the form is {SCHEME}NAME@VERSION")
    cache = Path(options.cache) if options.cache else cache_home() / "longstride" / "tasks"
    folder = cache / f"{match['name']}@{match['version']}"
    if not _has_tasks(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Several processes of a hub load the tasks.
            if not _has_tasks(folder):
                _download(f"{key}={value}", match[0], folder, options)
    return folder


def _has_tasks(folder: Path) -> bool:
    """Return whether a folder of the cache has tasks."""
    return folder.is_dir() and any(is_task(path) for path in folder.iterdir())


def _download(where: str, name: str, folder: Path, options: TerminalOptions) -> None:
    """Download a set of tasks with Harbor's own command. Raises: ConfigError."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ConfigError(
            f"{where}: {folder} has no tasks, and the command {PROGRAM} is missing; put the tasks"
            " into this folder, or install the package harbor in an environment with Python 3.12"
            " (uv tool install harbor)"
        )
    words = [program, "download", name, "--export"]
    if options.registry:
        kind = "--registry-url" if "://" in options.registry else "--registry-path"
        words += [kind, options.registry]
    logger.info("downloading tasks=%s folder=%s", name, folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        try:
            done = subprocess.run(
                [*words, "--output-dir", parent],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=DOWNLOAD_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{where}: {error}") from error
        text = done.stdout.decode("utf-8", errors="replace").strip()[-800:]
        made = [path for path in Path(parent).iterdir() if _has_tasks(path)]
        if done.returncode != 0 or len(made) != 1:
            raise ConfigError(f"{where}: {PROGRAM} download failed: {text or 'no tasks'}")
        made[0].rename(folder)
