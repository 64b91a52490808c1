"""Installs a lock file with uv where it is present, else with pip and a line per package.

It uses the standard library only, because it runs before any other package is installed.
"""

import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.text import counted

LOG_LINES = 15  # Lines of pip's own output that are shown after a failure.
UNPACK_S = 5.0  # Seconds between two progress lines during unpacking; pip itself reports none.
_PINNED = re.compile(r"^(?P<name>[\w.-]+)(\[[^]]*\])?==(?P<version>[^\s;]+)")
_WHEEL = re.compile(
    r"(?:Downloading|Using cached|Processing) (?:\S*/)?"
    r"(?P<name>\w[\w.]*)-(?P<version>\d[\w.+]*?)(?:-\S*\.whl|\.tar\.gz|\.zip)(?=\s|$)"
    r"(?: \((?P<size>[\d.]+ \wB)\))?"
)
_PRESENT = re.compile(r"Requirement already satisfied: (?P<name>[\w.-]+)==(?P<version>[\w.+]+)")


class InstallProgress:
    """Turns pip's output into one line per package."""

    def __init__(self, num_packages: int) -> None:
        self._num_packages = num_packages
        self._seen: set[str] = set()

    def read(self, line: str) -> Iterator[str]:
        """Yield the lines to show for one line of pip's output. Metadata downloads are skipped."""
        match = _WHEEL.search(line) or _PRESENT.match(line)
        if line.startswith("ERROR"):
            yield line.rstrip()
        elif line.startswith("Installing collected packages"):
            yield f"unpacking {counted(line.count(',') + 1, 'package')}"
        elif match and ".whl.metadata" not in line and match["name"] not in self._seen:
            self._seen.add(match["name"])
            size = match.groupdict().get("size")
            number = f"[{len(self._seen)}/{max(self._num_packages, len(self._seen))}]"
            name = match["name"].replace("_", "-")
            yield f"{number} {name} {match['version']}{f' ({size})' if size else ''}"


def count_packages(lock: Path) -> int:
    """Return the number of packages that a lock file pins."""
    return sum(bool(_PINNED.match(line)) for line in lock.read_text(encoding="utf-8").splitlines())


def pinned_versions(lock: Path) -> dict[str, str]:
    """Return the version of each package that a lock file pins; {} without the file."""
    if not lock.is_file():
        return {}
    lines = lock.read_text(encoding="utf-8").splitlines()
    pins = [match for line in lines if (match := _PINNED.match(line))]
    return {match["name"].replace("_", "-").lower(): match["version"] for match in pins}


def main(argv: Sequence[str]) -> int:
    """Install the lock file `argv[-1]` with the options before it; return the exit code.

    pip also installs what uv could not: it has a configuration of its own, such as its index.
    """
    *options, lock = argv
    if (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--python", sys.executable, *options, "-r", lock]
        if subprocess.run(command).returncode == 0:
            return 0
        _print_now("uv failed; pip installs the packages")
    return _install_with_pip(options, lock)


def _install_with_pip(options: Sequence[str], lock: str) -> int:
    """Install a lock file with pip; return pip's exit code."""
    folder = Path(sys.prefix)
    progress = InstallProgress(count_packages(Path(lock)))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    started = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        [*command, "--progress-bar=off", *options, "-r", lock],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line)
            for shown in progress.read(line):
                _print_now(shown)
                if shown.startswith("unpacking"):
                    threading.Thread(target=_print_unpacking, args=(pip, folder)).start()
    (folder / "install.log").write_text("".join(lines), encoding="utf-8")
    if pip.returncode != 0:
        output = [line for line in lines if not line.startswith("WARNING: Location")]
        _print_now("".join(output[-LOG_LINES:]).rstrip())
        _print_now(f"pip failed; its whole output: {folder / 'install.log'}")
    else:
        _print_now(f"installed in {time.monotonic() - started:.0f} s")
    return pip.returncode


def _print_unpacking(pip: subprocess.Popen[str], folder: Path) -> None:
    """Print the number of unpacked packages every `UNPACK_S` until pip ends."""
    reported = -1
    while True:
        now = len([*folder.glob("lib/python*/site-packages/*.dist-info")])
        if reported not in (-1, now):
            _print_now(f"  {counted(now, 'package')} unpacked")
        reported = now
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(UNPACK_S)
            return


def _print_now(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
