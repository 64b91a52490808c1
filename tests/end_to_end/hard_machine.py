"""A machine that leaves out what programs like to take for granted, made of namespaces on this one.

It has ::1 as its only address, a user without an entry and without a home, a temporary folder with
a long path, spaces and umlauts in the paths of checkout and environment, and a container's limits.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.end_to_end.runs import REPOSITORY

NO_ONE = 54321  # A user without an entry in the system's table.
CORES, MEMORY_BYTES = 1.5, 6 << 30
PERIOD_US = 100_000
RMDIR_S = 20.0
CGROUPS = Path("/sys/fs/cgroup")
# Arguments: base, checkout, number of closed folders, those with what must be seen in them; then
# the control groups up to "--", then the command.
SCRIPT = r"""
set -e
base=$1; checkout=$2; count=$3; shift 3
ip link set lo up
ip -4 address del 127.0.0.1/8 dev lo
while [ "$count" -gt 0 ]; do
  closed=$1; seen=$2; shift 2; count=$((count - 1))
  mkdir -p "$base/stash"; mount --bind "$seen" "$base/stash"
  mount -t tmpfs -o mode=755 none "$closed"
  (umask 022; mkdir -p "$seen"); mount --move "$base/stash" "$seen"
done
mount --bind "$checkout" "$base/check out ü"
while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done
shift
cd "$base/check out ü"
umask 077
exec setpriv --reuid=54321 --regid=54321 --clear-groups env -i "$@"
"""


class HardMachine:
    """Runs one command of the checkout under all these conditions at once."""

    def __init__(self, base: Path, groups: list[Path]) -> None:
        self.base = base
        self.groups = groups  # Control groups with limits; none if none can be made here.
        self.runs = base / "läufe mit leerzeichen"
        self.temporary = base / "scratch/slurm-jobs/cluster-a/partition-gpu/user.name/job_01234/tmp"
        self._python = base / "umgebung mit leerzeichen" / "bin" / "python"
        for folder in (self.runs, self.temporary):
            folder.mkdir(parents=True)
            os.chown(folder, NO_ONE, NO_ONE)
        (base / "check out ü").mkdir()
        self._python.parents[1].symlink_to(os.path.realpath(sys.prefix))

    def run(self, *words: str, timeout_s: float, **environ: str) -> "subprocess.Popen[str]":
        """Return `run.py` after its end, with its output in `log`."""
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "TMPDIR": str(self.temporary),
            **environ,
        }
        closed = _closed_folders()
        argv = [str(self.base), str(REPOSITORY), str(len(closed) // 2), *closed]
        argv += [*map(str, self.groups), "--", *(f"{k}={v}" for k, v in variables.items())]
        command = [str(self._python), "run.py", *words]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ["unshare", "-m", "-n", "sh", "-c", SCRIPT, "sh", *argv, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                start_new_session=True,
            )
            try:
                process.wait(timeout_s)
            finally:
                if process.poll() is None:
                    process.terminate()  # The launcher ends what it started.
                    process.wait(RMDIR_S * 5)
        return process

    @property
    def log(self) -> Path:
        return self.base / "log.txt"


def _closed_folders() -> list[str]:
    """Return folders that other users cannot pass, each with the one below that must be seen."""
    found: list[str] = []
    for needed in (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)):
        real = needed.resolve()
        for above in reversed(real.parents):
            if not above.stat().st_mode & 0o001:
                found += [str(above), str(real)]
                break
    return found


@contextmanager
def hard_machine() -> Iterator[HardMachine]:
    """Yield such a machine; nothing of it is left at the end."""
    with ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="hard-", dir="/tmp"))
        stack.callback(shutil.rmtree, base)
        base.chmod(0o755)
        groups = [path for path in map(_make_group, ("memory", "cpu")) if path is not None]
        for path in groups:
            stack.callback(_remove_group, path)
        yield HardMachine(base, groups)


def _make_group(controller: str) -> Path | None:
    """Return a new control group of version 1 with a limit, None if none can be made."""
    folder = CGROUPS / controller / f"hard-{os.getpid()}"
    limits = {
        "memory": {"memory.limit_in_bytes": MEMORY_BYTES},
        "cpu": {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": int(CORES * PERIOD_US)},
    }
    with suppress(OSError):
        folder.mkdir()
        try:
            for name, value in limits[controller].items():
                (folder / name).write_text(str(value), encoding="utf-8")
            return folder
        except OSError:
            folder.rmdir()
    return None


def _remove_group(folder: Path) -> None:
    """Remove a control group as soon as its last process has ended."""
    deadline = time.monotonic() + RMDIR_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)  # The kernel has no event for it.
