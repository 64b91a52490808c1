"""Laws of the process settings that a shell or a container leaves unset."""

import getpass
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.host.process_settings import (
    check_caches,
    complete_process_settings,
    find_home,
    is_writable,
    name_user,
    private_folder,
)
from common.repository import ROOT

NO_ONE = 54321  # A user without an entry in the system's table.
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user: needs root")


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A folder of a user without an entry, as whom the test runs."""
    with tempfile.TemporaryDirectory(prefix="stranger-", dir="/tmp") as name:
        folder = Path(name)
        os.chown(folder, NO_ONE, NO_ONE)
        os.setresuid(NO_ONE, NO_ONE, 0)
        yield folder
        os.setresuid(0, 0, 0)


@needs_root
def test_user_without_an_entry_gets_a_name(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError):
        getpass.getuser()
    name_user(os.environ)
    assert getpass.getuser() == "uid54321"
    monkeypatch.delenv("LOGNAME")


@needs_root
def test_user_without_home_gets_a_private_one(
    stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(stranger))
    environ: dict[str, str] = {}
    find_home(environ)
    home = stranger / "longstride-home-54321"
    assert environ["HOME"] == str(home)
    assert environ["XDG_CACHE_HOME"] == str(home / ".cache")
    assert home.stat().st_mode & 0o777 == 0o700


@needs_root
def test_read_only_home_keeps_its_name(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(stranger))
    environ = {"HOME": "/usr", "XDG_CONFIG_HOME": "/etc"}
    find_home(environ)
    assert environ["HOME"] == "/usr"
    assert environ["XDG_CONFIG_HOME"] == "/etc"
    assert environ["XDG_CACHE_HOME"] == str(stranger / "longstride-home-54321" / ".cache")


@needs_root
def test_private_folder_of_another_user_is_rejected(stranger: Path) -> None:
    os.setresuid(0, 0, 0)
    (stranger / f"longstride-home-{NO_ONE}").mkdir(mode=0o777)
    os.setresuid(NO_ONE, NO_ONE, 0)
    found = private_folder(stranger)
    assert found.name != f"longstride-home-{NO_ONE}"
    assert (found.stat().st_uid, found.stat().st_mode & 0o777) == (NO_ONE, 0o700)


@needs_root
def test_unwritable_cache_folder_is_named(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/usr/none/below")
    with pytest.raises(
        ConfigError, match=r"^XDG_CACHE_HOME=/usr/none/below: the folder is not writable"
    ):
        check_caches()
    monkeypatch.setenv("XDG_CACHE_HOME", str(stranger / "below"))
    check_caches()


def test_writable_home_is_unchanged(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    find_home(environ)
    assert environ == {"HOME": str(tmp_path)}
    assert is_writable(tmp_path)


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_gpus_follow_bus_order_unless_configured(order: str | None) -> None:
    environ = dict(os.environ) | ({"CUDA_DEVICE_ORDER": order} if order else {})
    complete_process_settings(environ)
    assert environ["CUDA_DEVICE_ORDER"] == (order or "PCI_BUS_ID")


def run_py(*words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", **environ},
        capture_output=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", pytest.param("POSIX", marks=pytest.mark.long)])
def test_non_utf8_locale_accepts_umlauts_in_arguments(locale: str) -> None:
    environ = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_py("--config", "smoke", "run.dir=läufe mit leerzeichen", "--dry-run", **environ)
    assert done.returncode == 0, done.stderr
    assert "dir: läufe mit leerzeichen" in done.stdout.decode("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("TMPDIR=/none", "TMPDIR=/none: the folder does not exist"),
        pytest.param(
            "WANDB_MODE=off", "WANDB_MODE=off: must be one of online", marks=pytest.mark.long
        ),
        pytest.param(
            "WANDB_DISABLED=maybe",
            "WANDB_DISABLED=maybe: must be true or false",
            marks=pytest.mark.long,
        ),
    ],
)
def test_unusable_environment_variable_is_named_before_start(
    variable: str, words: str, tmp_path: Path
) -> None:
    name, _, value = variable.partition("=")
    where = f"run.dir={tmp_path}"
    done = run_py("--config", "smoke", where, "log.wandb=auto", **{name: value})
    assert done.returncode == 2
    assert done.stderr.decode("utf-8").startswith(f"error: {words}")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.slow
def test_terminal_without_umlauts_gets_them_escaped() -> None:
    environ = {"PYTHONIOENCODING": "ascii:strict"}
    done = run_py("--config", "smoke", "run.dir=läufe", "--dry-run", **environ)
    assert done.returncode == 0, done.stderr
    assert rb"dir: l\xe4ufe" in done.stdout


@pytest.mark.slow
def test_venv_path_with_spaces_becomes_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "check out ü"
    folder.mkdir()
    (folder / "venv").symlink_to(sys.prefix)
    code = (
        "import os, sys\n"
        "from common.host.process_settings import start_with_plain_settings\n"
        "start_with_plain_settings()\n"
        "print(sys.prefix, os.path.realpath(sys.prefix), sep='|')\n"
    )
    python = folder / "venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=240
    )
    assert done.returncode == 0, done.stderr
    link, real = done.stdout.strip().split("|")
    assert (" " in link, real) == (False, os.path.realpath(sys.prefix))
    assert not Path(link).parent.exists()  # It went with its process.
