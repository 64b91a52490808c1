"""Laws of the journal."""

import struct
import subprocess
import sys
import zlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Self

import numpy as np
import pytest

from common.errors import WireError
from common.repository import ROOT
from common.wire.codec import encode, pack_record
from common.wire.messages import Trajectory
from learner.journal.journal import (
    JOURNAL_START,
    MAGIC,
    JournalPosition,
    JournalWriter,
    journal_files,
    load_pruned,
    read_journal,
    record_buffers,
)
from learner.journal.upkeep import pack, prune
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


def test_journal_of_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert ids(tmp_path / "none") == []


def test_journal_reads_from_a_position_on(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1", "g/2")
    assert ids(tmp_path, start=positions[1]) == ["g/1", "g/2"]


def test_reopened_journal_continues_at_its_end(tmp_path: Path) -> None:
    write(tmp_path, "g/0")
    write(tmp_path, "g/1")
    assert ids(tmp_path) == ["g/0", "g/1"]


def test_full_journal_file_starts_a_new_one(tmp_path: Path) -> None:
    size = _record_size(tmp_path / "one")
    positions = write(tmp_path, "g/0", "g/1", "g/2", max_file_bytes=2 * size)
    assert [(p.file, p.offset) for p in positions] == [(0, 0), (0, size), (1, 0)]
    assert ids(tmp_path) == ["g/0", "g/1", "g/2"]


def test_journal_moves_a_torn_tail_aside(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1")
    path = tmp_path / "000000.log"
    torn = path.read_bytes()[len(MAGIC) + positions[1].offset : -3]
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "synced").unlink()  # nothing of it was acknowledged
    assert ids(tmp_path) == ["g/0"]
    writer = JournalWriter(tmp_path)
    writer.append(make_trajectory("g/2"))
    writer.close()
    assert ids(tmp_path) == ["g/0", "g/2"]
    assert (tmp_path / f"000000-{positions[1].offset}.torn").read_bytes() == torn


@pytest.mark.parametrize("tail", [b"\x01", b"\0" * 8, b"\0" * 4096, b"\x05\0\0\0ABCDab"])
def test_journal_ends_cleanly_at_a_crashed_tail(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, "g/0")
    with (tmp_path / "000000.log").open("ab") as handle:
        handle.write(tail)
    assert ids(tmp_path) == ["g/0"]
    JournalWriter(tmp_path).close()
    (torn,) = tmp_path.glob("*.torn")
    assert torn.read_bytes() == tail


def test_damaged_record_error_names_file_and_offset(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1", "g/2")
    path = tmp_path / "000000.log"
    content = bytearray(path.read_bytes())
    content[len(MAGIC) + positions[1].offset + 30] ^= 1
    path.write_bytes(content)
    with pytest.raises(WireError, match=rf"000000\.log at offset {positions[1].offset}"):
        ids(tmp_path)
    with pytest.raises(WireError, match=rf"offset {positions[1].offset}"):
        JournalWriter(tmp_path)


def test_torn_or_missing_finished_file_raises(tmp_path: Path) -> None:
    write(tmp_path, "g/0", "g/1", "g/2", max_file_bytes=1)
    path = tmp_path / "000001.log"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WireError, match="finished file"):
        ids(tmp_path)
    path.unlink()
    with pytest.raises(WireError, match="missing"):
        ids(tmp_path)


def test_start_position_beyond_the_end_raises(tmp_path: Path) -> None:
    write(tmp_path, "g/0")
    with pytest.raises(WireError, match="999999"):
        ids(tmp_path, start=JournalPosition(file=0, offset=999999))


def test_journal_reads_only_complete_records_during_writes(tmp_path: Path) -> None:
    positions = write(tmp_path / "whole", "g/0", "g/1")
    content = (tmp_path / "whole" / "000000.log").read_bytes()
    partial = tmp_path / "partial"
    partial.mkdir()
    for size in range(0, len(content) + 1, 7):
        (partial / "000000.log").write_bytes(content[:size])
        first_end = len(MAGIC) + positions[1].offset
        num_whole = 2 if size == len(content) else int(size >= first_end)
        assert len(ids(partial)) == num_whole


def test_journal_reader_follows_its_writer_across_files(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, max_file_bytes=1)
    writer.append(make_trajectory("g/0"))
    reader = read_journal(tmp_path)
    assert next(reader)[1].episode_id == "g/0"
    writer.append(make_trajectory("g/1"))
    assert next(reader)[1].episode_id == "g/1"
    writer.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_flipped_head_bit_never_cuts_acknowledged_records(tmp_path: Path, number: int) -> None:
    start = len(MAGIC) + write(tmp_path, "g/0", "g/1", "g/2")[number].offset
    path = tmp_path / "000000.log"
    content = path.read_bytes()
    for bit in range(8 * 24):  # the head, and how many frames there are
        damaged = bytearray(content)
        damaged[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        for use in (ids, JournalWriter):
            with pytest.raises(WireError, match=r"000000\.log at offset .* damaged.*verify"):
                use(tmp_path)
        assert path.read_bytes() == damaged


def test_journal_refuses_a_file_with_damaged_magic(tmp_path: Path) -> None:
    write(tmp_path, "g/0")
    path = tmp_path / "000000.log"
    content = path.read_bytes()
    for bit in range(8 * len(MAGIC)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(WireError, match=r"000000\.log.* damaged"):
            JournalWriter(tmp_path)
        assert path.read_bytes() == damaged


def test_damaged_middle_record_is_refused_without_mark(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1", "g/2")
    path, content = tmp_path / "000000.log", (tmp_path / "000000.log").read_bytes()
    (tmp_path / "synced").unlink()
    for bit in range(8 * 24):
        damaged = bytearray(content)
        damaged[len(MAGIC) + positions[1].offset + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        follows = f"offset {positions[1].offset}.*follow from offset {positions[2].offset}"
        with pytest.raises(WireError, match=follows):
            ids(tmp_path)
        with pytest.raises(WireError, match=follows):
            JournalWriter(tmp_path)


def test_missing_acknowledged_tail_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "g/0", "g/1", max_file_bytes=1)
    last = tmp_path / "000001.log"
    content = last.read_bytes()
    for left in (content[:-1], content[: len(MAGIC)], b""):
        last.write_bytes(left)
        with pytest.raises(WireError, match=r"000001\.log.* damaged.*remove .*synced"):
            JournalWriter(tmp_path)
    last.unlink()
    for use in (ids, JournalWriter):
        with pytest.raises(WireError, match=r"000001\.log is missing"):
            use(tmp_path)
    (tmp_path / "synced").unlink()
    assert ids(tmp_path) == ["g/0"]
    JournalWriter(tmp_path).close()


def _write_old_file(folder: Path, *episode_ids: str) -> list[int]:
    """Write a file as versions before did; return where its records begin."""
    folder.mkdir(exist_ok=True)
    content, starts = b"", []
    for episode_id in episode_ids:
        payload = pack_record(make_trajectory(episode_id))
        starts.append(len(content))
        content += struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    (folder / "000000.log").write_bytes(content)
    return starts


def test_old_format_files_are_read_and_continued(tmp_path: Path) -> None:
    starts = _write_old_file(tmp_path, "g/0", "g/1")
    assert ids(tmp_path, start=JournalPosition(offset=starts[1])) == ["g/1"]
    (position,) = write(tmp_path, "g/2")
    assert position == JournalPosition(file=1)
    assert ids(tmp_path) == ["g/0", "g/1", "g/2"]


def test_old_format_with_flipped_length_is_refused(tmp_path: Path) -> None:
    starts = _write_old_file(tmp_path, "g/0", "g/1", "g/2")
    path, content = tmp_path / "000000.log", (tmp_path / "000000.log").read_bytes()
    for bit in range(32):
        damaged = bytearray(content)
        damaged[starts[1] + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(WireError, match=f"offset {starts[1]}"):
            JournalWriter(tmp_path)
        assert path.read_bytes() == damaged


class Disk(JournalWriter):
    """Counts how often a journal was synced."""

    num_syncs = 0

    def _sync(self) -> None:
        self.num_syncs += 1
        super()._sync()


def test_opening_a_journal_syncs_before_any_acknowledgement(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.append(make_trajectory("g/0"))  # Then killed: unsynced bytes can be lost.
    writer._lock.close()
    opened = Disk(tmp_path)
    assert opened.num_syncs == 1
    opened.close()
    assert ids(tmp_path) == ["g/0"]


def test_packed_files_read_as_before_from_anywhere(tmp_path: Path) -> None:
    size = _record_size(tmp_path / "one")
    names = [f"g/{i}" for i in range(6)]
    positions = write(tmp_path, *names, max_file_bytes=2 * size)
    reader = read_journal(tmp_path)
    next(reader)
    assert pack(tmp_path, 0) != 0
    pack(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("0*")) == [
        "000000.log.gz",
        "000001.log.gz",
        "000002.log",
    ]
    assert [t.episode_id for _, t in reader] == names[1:]  # begun before, and none the wiser
    assert ids(tmp_path) == names
    assert ids(tmp_path, start=positions[3]) == names[3:]
    path = tmp_path / "000001.log.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(WireError, match=r"000001\.log\.gz"):
        ids(tmp_path)


class CompressedMeanwhile(PosixPath):
    """A folder whose first file is compressed after the first listing."""

    def glob(self, pattern: str) -> Generator[Self, None, None]:
        listed = list(super().glob(pattern))
        if (self / "000000.log").exists():
            pack(Path(self), 0)
        yield from listed


def test_file_is_listed_during_its_compression(tmp_path: Path) -> None:
    write(tmp_path, "g/0", "g/1", max_file_bytes=1)
    assert [*journal_files(CompressedMeanwhile(tmp_path))] == [0, 1]
    assert [*tmp_path.glob("000000*")] == [tmp_path / "000000.log.gz"]


def test_pruned_files_are_refused_or_skipped(tmp_path: Path) -> None:
    positions = write(tmp_path, "g/0", "g/1", "g/2", max_file_bytes=1)
    prune(tmp_path, before=2, may_remove=lambda number, path: True)
    assert load_pruned(tmp_path).before == 2
    assert ids(tmp_path) == ["g/2"]
    assert ids(tmp_path, start=positions[2]) == ["g/2"]
    for start in (JOURNAL_START, positions[1]):
        with pytest.raises(WireError, match=r"files 0 to 1 of .* were pruned"):
            ids(tmp_path, start=start)
    JournalWriter(tmp_path).close()


@pytest.mark.slow
def test_journal_refuses_a_second_writing_process(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    script = "import sys, pathlib; from learner.journal.journal import JournalWriter as W; "
    script += "W(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = ROOT
    second = subprocess.run(
        command, cwd=root, check=False, capture_output=True, encoding="utf-8", timeout=120
    )
    assert "another process writes this journal" in second.stderr
    writer.close()
    third = subprocess.run(
        command, cwd=root, check=False, capture_output=True, encoding="utf-8", timeout=120
    )
    assert third.returncode == 0


def _record_size(folder: Path) -> int:
    write(folder, "g/0")
    return (folder / "000000.log").stat().st_size - len(MAGIC)


def test_batched_append_equals_single_appends(tmp_path: Path) -> None:
    trajectories = [make_trajectory(f"g/{i}") for i in range(9)]
    records = [(each, encode(each)) for each in trajectories]
    num_bytes = sum(map(len, record_buffers(records[0][1])))
    single = JournalWriter(tmp_path / "single", max_file_bytes=4 * num_bytes)
    one_by_one = [single.append(*record) for record in records]
    single.close()
    batched = JournalWriter(tmp_path / "batched", max_file_bytes=4 * num_bytes)
    at_once: list[JournalPosition] = []
    num_calls = 0
    while len(at_once) < len(records):
        at_once += batched.append_some(records[len(at_once) :])
        num_calls += 1
    batched.close()
    assert at_once == one_by_one
    assert num_calls == 3  # one for each file
    for path in (tmp_path / "single").glob("*.log"):
        assert path.read_bytes() == (tmp_path / "batched" / path.name).read_bytes()
