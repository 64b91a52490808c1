"""Laws of the step log."""

from pathlib import Path

import pytest

from common.wire.messages import EpisodeOutcome, Outcome
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
def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    write(path, 3)
    assert path.read_bytes().startswith(whole)
    assert [step.version for step in read(path)] == [1, 2, 3]


def test_a_step_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.append(make_step(1))
    assert read(tmp_path / "steps.jsonl") == [make_step(1)]
    log.close()
