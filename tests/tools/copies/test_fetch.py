"""Laws of restoring a run from its copy, and of the targets of copies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import run
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from learner.training.shards import write_manifest
from tests.tools.copies.runs import add_checkpoint, copier_of, digests, make_copied_run
from tools.copies.copier import copy_all
from tools.copies.fetch import fetch
from tools.copies.manifest import FOLDER, StoredFile, StoredPart, decode, file_name
from tools.copies.store import OBJECTS, check_target, open_target


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_copied_run(tmp_path / "runs" / "a", num=4)


@pytest.fixture
def copy(run_dir: RunDir, tmp_path: Path) -> Path:
    """The folder of the run's copy."""
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    copy_all(copier)
    return Path(copier.state.to)


def test_incomplete_manifest_is_ignored(copy: Path, tmp_path: Path) -> None:
    (whole,) = (copy / FOLDER).iterdir()
    content = whole.read_bytes().replace(b'"number":1', b'"number":2')
    (copy / FOLDER / file_name(2, content)).write_bytes(content[:-20])
    assert fetch(str(copy), tmp_path / "b") == tmp_path / "b" / "a"


def test_copy_states_which_checkpoint_has_files_elsewhere(
    run_dir: RunDir,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_checkpoint(run_dir, 20)
    write_manifest(run_dir.checkpoints / "step-000020", [])
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    copy_all(copier)
    copy_all(copier)
    text = "the checkpoints of step 20 lack the files on other nodes"
    assert caplog.text.count(text) == 1
    fetch(copier.state.to, tmp_path / "b")
    assert text in capsys.readouterr().out.splitlines()[-1]


def test_damaged_part_is_refused(copy: Path, tmp_path: Path) -> None:
    part = max((copy / OBJECTS).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[7] ^= 1
    part.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{part.name}: damaged"):
        fetch(str(copy), tmp_path / "b")
    assert not any((tmp_path / "b").iterdir())  # No part of a run is left.


def test_manifest_cannot_name_a_file_outside_the_run(copy: Path, tmp_path: Path) -> None:
    (path,) = (copy / FOLDER).iterdir()
    manifest = decode(path.name, path.read_bytes())
    assert manifest is not None
    for name in ("../evil", "/etc/evil", "journal/../../evil"):
        files = {name: manifest.files["date.txt"]}
        content = replace(manifest, number=9, files=files).encode()
        bad = copy / FOLDER / file_name(9, content)
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match="is not valid"):
            fetch(str(copy), tmp_path / "b")
        bad.unlink()


@pytest.mark.parametrize("run", ["../evil", "/etc/evil", "..", ".evil", "", "a/b", "latest"])
def test_manifest_cannot_name_a_run_outside_the_folder(
    copy: Path, tmp_path: Path, run: str
) -> None:
    (path,) = (copy / FOLDER).iterdir()
    manifest = decode(path.name, path.read_bytes())
    assert manifest is not None
    content = replace(manifest, number=9, run=run).encode()
    (copy / FOLDER / file_name(9, content)).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"the name of the run {run!r} must be")):
        fetch(str(copy), tmp_path / "b")
    assert not (tmp_path / "evil").exists()


def test_manifest_with_a_negative_size_is_refused(copy: Path, tmp_path: Path) -> None:
    (path,) = (copy / FOLDER).iterdir()
    manifest = decode(path.name, path.read_bytes())
    assert manifest is not None
    parts = [StoredPart(digest="a" * 64, size=size) for size in (-5, 5)]
    content = replace(manifest, number=9, files={"a": StoredFile(size=0, parts=parts)}).encode()
    (copy / FOLDER / file_name(9, content)).write_bytes(content)
    with pytest.raises(ConfigError, match="the entry 'a' is not valid"):
        fetch(str(copy), tmp_path / "b")


def test_manifest_of_another_format_is_refused(copy: Path, tmp_path: Path) -> None:
    content = json.dumps({"format": 99}).encode()
    (copy / FOLDER / file_name(9, content)).write_bytes(content)
    with pytest.raises(ConfigError, match="has format 99"):
        fetch(str(copy), tmp_path / "b")


def test_fetch_refuses_an_existing_run_and_names_several(
    run_dir: RunDir, copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="exists; give another name with to=NAME"):
        fetch(str(copy), run_dir.root.parent)
    (copy.parent / "b-01234567").mkdir()
    with pytest.raises(ConfigError, match=r"holds the copies a-[0-9a-f]{8}, b-01234567; name one"):
        fetch(str(copy.parent), tmp_path / "b")
    with pytest.raises(ConfigError, match="holds no copy"):
        fetch(str(tmp_path / "none"), tmp_path / "b")


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/runs", "s3fs"), ("gs://bucket/runs", "gcsfs")]
)
def test_missing_backend_is_refused_by_name(url: str, package: str) -> None:
    with pytest.raises(ConfigError, match=rf"journal\.copy_to={url}: .*not installed.*{package}"):
        open_target(url)


def test_password_in_a_target_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="must contain no password") as caught:
        open_target("ftp://me:swordfish@host/x")
    assert "swordfish" not in str(caught.value)
    with pytest.raises(ConfigError, match="not a usable folder or URL"):
        open_target("nosuch://x")
    with pytest.raises(ConfigError, match="name a folder"):
        check_target("memory://x")


def test_commands_copy_and_fetch_a_run(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"run.dir={tmp_path / 'runs'}"
    url = f"{tmp_path}/copies"
    assert run.main(["journal", "a", "copy", f"to={url}", where]) == 0
    assert run.main(["journal", url, "fetch", "to=b", where]) == 0
    out = capsys.readouterr().out
    assert "fetched" in out
    assert "a checkpoint of step 10" in out
    for name in ("journal", "checkpoints"):
        expected = digests(run_dir.root / name)
        expected.pop("lock", None)
        assert digests(tmp_path / "runs" / "b" / name) == expected
    assert run.main(["journal", "b", "verify", where]) == 0
    assert run.main(["journal", url, "fetch", "to=../x", where]) == 2
    assert run.main(["journal", "a", "copy", where]) == 2
    assert run.main(["journal", "a", "copy", f"to={url}", "every_s=x", where]) == 2


def test_run_is_copied_before_it_has_a_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs" / "a"
    root.mkdir(parents=True)
    (root / "date.txt").write_text("2026-01-02\n", encoding="utf-8")
    where = f"run.dir={root.parent}"
    url = f"{tmp_path}/copies"
    assert run.main(["journal", "none", "copy", f"to={url}", where]) == 2
    assert run.main(["journal", "a", "copy", f"to={url}", where]) == 0
    assert run.main(["journal", url, "fetch", "to=b", where]) == 0
    assert (root.parent / "b" / "date.txt").read_text(encoding="utf-8") == "2026-01-02\n"
    assert "no checkpoint" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_process_leaves_the_previous_copy_whole(
    run_dir: RunDir, copy: Path, tmp_path: Path
) -> None:
    before = {each.name for each in (copy / OBJECTS).iterdir()}
    large = run_dir.checkpoints / "step-000020"
    large.mkdir()
    for number in range(64):
        (large / f"{number}.distcp").write_bytes(os.urandom(1 << 20))
    (large / "COMPLETE").write_text('{"version": 20}', encoding="utf-8")
    where = f"run.dir={run_dir.root.parent}"
    argv = [sys.executable, "run.py", "journal", "a", "copy", f"to={copy.parent}", where]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while {each.name for each in (copy / OBJECTS).iterdir()} == before:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    restored = RunDir(root=fetch(str(copy), tmp_path / "b"))
    assert (restored.checkpoints / "step-000010" / "COMPLETE").exists()
