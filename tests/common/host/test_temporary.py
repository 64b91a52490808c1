"""Laws of the folder for temporary files."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.host.temporary import check_temporary, check_temporary_room, shorten_temporary
from common.repository import ROOT


@pytest.fixture(autouse=True)
def kept_folder() -> Iterator[None]:
    """Let Python find its temporary folder anew after each test."""
    yield
    tempfile.tempdir = None


def long_folder(tmp_path: Path) -> Path:
    folder = tmp_path / ("partition-" + 60 * "x") / "job"
    folder.mkdir(parents=True)
    return folder


def test_long_path_becomes_a_short_link(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(long_folder(tmp_path))}
    shorten_temporary(environ)
    link = Path(environ["TMPDIR"])
    assert len(str(link)) <= 27
    assert link.resolve() == Path(tmp_path / ("partition-" + 60 * "x") / "job").resolve()
    assert link.parent.stat().st_mode & 0o777 == 0o700
    name = "ls-ray-12345678/session_2026-11-26_18-22-42_123456_1234567/sockets/plasma_store"
    (link / name).parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(link / name))


def test_path_with_a_space_becomes_a_link(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="a b", dir="/tmp"))
    environ = {"TMPDIR": str(folder)}
    shorten_temporary(environ)
    link = Path(environ["TMPDIR"])
    assert (" " in str(link), link.resolve()) == (False, folder.resolve())
    folder.rmdir()


def test_short_path_is_unchanged() -> None:
    environ = {"TMPDIR": "/tmp"}
    shorten_temporary(environ)
    assert environ == {"TMPDIR": "/tmp"}


def test_long_path_without_link_place_is_refused(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(long_folder(tmp_path))}
    with pytest.raises(ConfigError, match=r"^TMPDIR=.*at most 27 without spaces"):
        shorten_temporary(environ, places=[tmp_path / "missing"])


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP"])
def test_missing_folder_is_refused_by_its_variable(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.*/none: the folder does not exist"):
        check_temporary({name: str(tmp_path / "none")})


def test_folder_without_permission_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^TMPDIR=/proc: the folder is not writable"):
        check_temporary({"TMPDIR": "/proc"})


def test_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.chdir(tmp_path)
    environ = {"TMPDIR": "t"}
    check_temporary(environ)
    assert environ["TMPDIR"] == str(tmp_path / "t")


def test_full_disk_is_refused_by_name() -> None:
    check_temporary_room(Path("/tmp"))
    with pytest.raises(ConfigError, match=r"^TMPDIR=/proc: its disk is full"):
        check_temporary_room(Path("/proc"))  # A file system without any room.


@pytest.mark.slow
def test_temporary_link_disappears_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from common.host.temporary import shorten_temporary, take_over_links\n"
        "if len(sys.argv) == 1:\n"
        "    shorten_temporary(os.environ)\n"
        "    os.execv(sys.executable, [sys.executable, '-c', sys.orig_argv[2], 'again'])\n"
        "take_over_links(os.environ)\n"
        "print(os.environ['TMPDIR'], os.path.isdir(os.environ['TMPDIR']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(long_folder(tmp_path))},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    link, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(link).parent.exists()
