"""Laws of the step log."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeOutcome, Outcome
from learner.ingest.journal_index import FROM_THE_START, ReplayPoint
from learner.recovery.resume import num_last_skipped, steps_since
from learner.recovery.step_log import LoggedStep, StepLog, read_steps


def make_step(version: int) -> LoggedStep:
    name = f"g{version}/0"
    outcome = EpisodeOutcome(episode_id=name, outcome=Outcome.TRAINED, cause="")
    return LoggedStep(version=version, groups=[[name, f"g{version}/1"]], outcomes=[outcome])


def write(path: Path, *versions: int) -> None:
    log = StepLog(path)
    for version in versions:
        log.append(make_step(version))
    log.close()


def read(path: Path) -> list[LoggedStep]:
    return list(read_steps(path))


def test_steps_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "steps.jsonl"
    write(path, 1, 2)
    assert read(path) == [make_step(1), make_step(2)]
    write(path, 3)
    assert read(path) == [make_step(1), make_step(2), make_step(3)]


@pytest.mark.parametrize("tail", [b'{"version":3,"gro', b"\0\0\0\0", b"{", "ä".encode()[:1]])
def test_torn_last_line_is_cut_and_the_rest_kept(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    write(path, 3)
    assert path.read_bytes().startswith(whole)
    assert [step.version for step in read(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", [b"", b"{", b"\0\xff", b"[]", b"5", b'{"version":1}', b"null"])
def test_damaged_line_is_named_with_remedy(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + second)
    named = r"steps\.jsonl: line 2 is damaged.*restore it from a backup"
    with pytest.raises(ConfigError, match=named):
        StepLog(path)
    with pytest.raises(ConfigError, match=named):
        read(path)


@pytest.mark.parametrize("num_left", [0, 1])
def test_log_shorter_than_checkpoint_is_refused(tmp_path: Path, num_left: int) -> None:
    run_dir = RunDir(root=tmp_path)
    write(run_dir.steps, 1, 2)
    lines = run_dir.steps.read_bytes().splitlines(keepends=True)
    run_dir.steps.write_bytes(b"".join(lines[:num_left]))
    with pytest.raises(ConfigError, match=r"steps\.jsonl: damaged, its last step is"):
        steps_since(run_dir, start=FROM_THE_START, version=2, num_batches=2)
    behind = ReplayPoint(version=2, steps_offset=len(lines[0]) + len(lines[1]))
    with pytest.raises(ConfigError, match=r"steps\.jsonl: damaged, the file ends before byte"):
        steps_since(run_dir, start=behind, version=2, num_batches=2)


def test_steps_after_a_checkpoint_follow_its_batch_number(tmp_path: Path) -> None:
    run_dir, log = RunDir(root=tmp_path), StepLog(tmp_path / "journal" / "steps.jsonl")
    for number, version, is_skipped in [(1, 1, False), (2, 1, True), (3, 1, True), (4, 2, False)]:
        log.append(replace(make_step(version), number=number, is_skipped=is_skipped))
    log.close()

    def since(version: int, num_batches: int) -> list[int]:
        steps = steps_since(run_dir, start=FROM_THE_START, version=version, num_batches=num_batches)
        return [step.number for step in steps]

    assert since(0, 0) == [1, 2, 3, 4]
    assert since(1, 1) == [2, 3, 4]  # saved at once after step 1
    assert since(1, 2) == [3, 4]  # stopped, and saved, after the first batch that was skipped
    assert since(2, 4) == []
    assert since(1, 0) == [2, 3, 4]  # The version was not counted.


def test_batches_skipped_last_are_counted_without_a_step_to_repeat(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    log = StepLog(run_dir.steps)
    counts: list[int] = []
    for number, is_skipped in enumerate([False, True, True, False], 1):
        log.append(replace(make_step(1), number=number, is_skipped=is_skipped))
        counts.append(num_last_skipped(run_dir, start=FROM_THE_START))
    log.close()
    assert counts == [0, 1, 2, 0]


def test_restart_reads_the_log_from_the_first_needed_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    for version in (1, 2, 3):
        outcome = EpisodeOutcome(
            episode_id=f"g000000{version}/0", outcome=Outcome.TRAINED, cause=""
        )
        log.append(replace(make_step(version), outcomes=[outcome]))
    starts = [step.offset for step in read(path)]
    assert log.first_needed(version=0, closed_below=9) == starts[0]
    assert log.first_needed(version=9, closed_below=2) == starts[1]
    assert log.first_needed(version=2, closed_below=9) == starts[2]
    log.close()
    again = StepLog(path, start=starts[2])
    assert again.first_needed(version=2, closed_below=9) == starts[2]
    assert again.first_needed(version=3, closed_below=9) == path.stat().st_size
    assert [s.version for s in read_steps(path, start=starts[1])] == [2, 3]
    again.close()


def test_append_returns_after_the_step_is_on_disk(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.append(make_step(1))
    assert read(tmp_path / "steps.jsonl") == [make_step(1)]
    log.close()
