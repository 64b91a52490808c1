"""Laws of the journal."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import WireError
from common.repository import ROOT
from common.store.journal import JournalPosition, JournalWriter, read_journal
from common.wire.messages import Trajectory
from tests.learner import builders


def make_trajectory(episode_id: str) -> Trajectory:
    versions = np.array([-1, 0, 1], dtype=np.int32)
    logprobs = [-0.5, -0.25]
    trajectory = builders.make_trajectory([1, 2, 3], [0, 1, 1], logprobs=logprobs, group_id="g")
    return replace(trajectory, episode_id=episode_id, versions=versions)


def write(folder: Path, *episode_ids: str, **options: int) -> list[JournalPosition]:
    writer = JournalWriter(folder, **options)
    positions = [writer.append(make_trajectory(episode_id)) for episode_id in episode_ids]
    writer.close()
    return positions


def ids(folder: Path, **options: JournalPosition) -> list[str]:
    return [trajectory.episode_id for _, trajectory in read_journal(folder, **options)]


def test_journal_returns_trajectories_and_positions_as_written(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1")
    records = list(read_journal(tmp_path))
    assert [position for position, _ in records] == positions
    assert [trajectory.episode_id for _, trajectory in records] == ["g/0", "g/1"]
    assert records[0][1].logprobs.tolist() == [0.0, -0.5, -0.25]
    assert records[0][1].versions.tolist() == [-1, 0, 1]


def test_journal_is_empty_when_the_folder_is_missing(tmp_path: Path) -> None:
    assert ids(tmp_path / "none") == []


def test_journal_reads_from_a_position_on(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1", "g/2")
    assert ids(tmp_path, start=positions[1]) == ["g/1", "g/2"]


def test_journal_continues_behind_its_end_when_opened_again(tmp_path: Path) -> None:
    write(tmp_path, "g/0")
    write(tmp_path, "g/1")
    assert ids(tmp_path) == ["g/0", "g/1"]


def test_journal_starts_a_new_segment_when_one_is_full(tmp_path: Path) -> None:
    size = _record_size(tmp_path / "one")
    positions = write(tmp_path, "g/0", "g/1", "g/2", max_segment_bytes=2 * size)
    assert [(p.segment, p.offset) for p in positions] == [(0, 0), (0, size), (1, 0)]
    assert ids(tmp_path) == ["g/0", "g/1", "g/2"]


def test_journal_cuts_a_torn_tail_and_keeps_the_bytes_aside(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1")
    path = tmp_path / "000000.log"
    torn = path.read_bytes()[positions[1].offset : -3]
    path.write_bytes(path.read_bytes()[:-3])
    assert ids(tmp_path) == ["g/0"]
    writer = JournalWriter(tmp_path)
    writer.append(make_trajectory("g/2"))
    writer.close()
    assert ids(tmp_path) == ["g/0", "g/2"]
    assert (tmp_path / f"000000-{positions[1].offset}.torn").read_bytes() == torn


@pytest.mark.parametrize("tail", [b"\x01", b"\0" * 8, b"\0" * 4096, b"\x05\0\0\0ABCDab"])
def test_journal_ends_cleanly_at_a_tail_that_a_crash_can_leave(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, "g/0")
    with (tmp_path / "000000.log").open("ab") as handle:
        handle.write(tail)
    assert ids(tmp_path) == ["g/0"]
    JournalWriter(tmp_path).close()
    (torn,) = tmp_path.glob("*.torn")
    assert torn.read_bytes() == tail


def test_journal_names_file_and_offset_when_a_record_in_the_middle_is_damaged(
    tmp_path: Path,
) -> None:
    positions = write(tmp_path, "g/0", "g/1", "g/2")
    path = tmp_path / "000000.log"
    content = bytearray(path.read_bytes())
    content[positions[1].offset + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(WireError, match=rf"000000\.log at offset {positions[1].offset}"):
        ids(tmp_path)
    with pytest.raises(WireError, match=rf"offset {positions[1].offset}"):
        JournalWriter(tmp_path)


def test_journal_raises_when_a_finished_segment_is_torn_or_missing(tmp_path: Path) -> None:
    write(tmp_path, "g/0", "g/1", "g/2", max_segment_bytes=1)
    path = tmp_path / "000001.log"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WireError, match="finished segment"):
        ids(tmp_path)
    path.unlink()
    with pytest.raises(WireError, match="missing"):
        ids(tmp_path)


def test_journal_raises_when_the_start_lies_behind_the_end(tmp_path: Path) -> None:
    write(tmp_path, "g/0")
    with pytest.raises(WireError, match="999999"):
        ids(tmp_path, start=JournalPosition(segment=0, offset=999999))


def test_journal_shows_only_whole_records_at_every_byte_of_a_write(tmp_path: Path) -> None:
    positions = write(tmp_path / "whole", "g/0", "g/1")
    content = (tmp_path / "whole" / "000000.log").read_bytes()
    partial = tmp_path / "partial"
    partial.mkdir()
    for size in range(0, len(content) + 1, 7):
        (partial / "000000.log").write_bytes(content[:size])
        num_whole = 2 if size == len(content) else int(size >= positions[1].offset)
        assert len(ids(partial)) == num_whole


def test_journal_reader_follows_a_writer_into_the_next_segment(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, max_segment_bytes=1)
    writer.append(make_trajectory("g/0"))
    reader = read_journal(tmp_path)
    assert next(reader)[1].episode_id == "g/0"
    writer.append(make_trajectory("g/1"))
    assert next(reader)[1].episode_id == "g/1"
    writer.close()


@pytest.mark.slow
def test_journal_refuses_a_second_process_that_writes(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    script = "import sys, pathlib; from common.store.journal import JournalWriter as W; "
    script += "W(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = ROOT
    second = subprocess.run(
        command, cwd=root, check=False, capture_output=True, text=True, timeout=30
    )
    assert "another process is writing" in second.stderr
    writer.close()
    third = subprocess.run(
        command, cwd=root, check=False, capture_output=True, text=True, timeout=30
    )
    assert third.returncode == 0


def _record_size(folder: Path) -> int:
    write(folder, "g/0")
    return (folder / "000000.log").stat().st_size
