"""Laws of a run of months: its directory is bounded, and a restart still works."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeOutcome, Outcome
from learner.build import Learner
from learner.ingest.journal_index import JournalIndex, ReplayPoint, load_replay_point
from learner.journal import metrics as metrics_module
from learner.journal.journal import JournalPosition, JournalWriter, load_pruned, read_journal
from learner.journal.metrics import MetricsWriter
from learner.journal.upkeep import RetentionLimits, prune_old
from learner.main import Saving
from learner.recovery.checksums import ChecksumLog
from learner.recovery.resume import steps_since
from learner.recovery.step_log import LoggedStep, StepLog, read_steps
from learner.training.digests import StepDigests
from scheduler import main as scheduler_module
from tests.learner.builders import make_trajectory

NUM_STEPS, EVERY, KEPT = 600, 10, 3
LIMITS = RetentionLimits(keep_bytes=80_000)


class LongRun:
    """Writes a learner's files; replaces its checkpoints, its buffer and its upkeep."""

    def __init__(self, root: Path) -> None:
        self.run_dir = RunDir(root=root)
        self.journal = JournalWriter(self.run_dir.journal, max_file_bytes=5_000)
        self.step_log = StepLog(self.run_dir.steps, prune_from_bytes=4_000)
        self.checksums = ChecksumLog(self.run_dir.checksums, version=0)
        self.metrics = MetricsWriter(self.run_dir, [])
        self.index = JournalIndex(end=self.journal.position)
        self.version = self.oldest_version = 0
        given: dict[str, Any] = dict.fromkeys(Learner.__dataclass_fields__, self)
        given |= {"run_dir": self.run_dir, "journal": self.journal, "step_log": self.step_log}
        learner = Learner(
            **given
            | {
                "checksums": self.checksums,
                "metrics": self.metrics,
                "reward_log": None,
                "part_log": None,
            }
        )
        self.saving = Saving(learner, set_status=lambda **_: None, check=lambda: None)

    def poll(self) -> float:
        return 1.0

    def replay_point(self, *, version: int) -> ReplayPoint:
        return self.index.replay_point(num_saved=0, version=version)

    def settled(self, position: JournalPosition) -> None:
        prune_old(self.run_dir.journal, LIMITS, before=position.file)

    def step(self) -> None:
        self.version += 1
        group = f"g{self.version:07d}"
        tokens, mask = [5] * 20, [0, 0, *[1] * 18]
        members = [make_trajectory(tokens, mask, group_id=group, member=m) for m in (0, 1)]
        for number, each in enumerate(members):
            self.index.add_entry(each, self.journal.append(each), num_queued=number)
        self.journal.sync()
        self.index.move_end(self.journal.position)
        ids = [each.episode_id for each in members]
        told = [EpisodeOutcome(episode_id=i, outcome=Outcome.TRAINED, cause="") for i in ids]
        number, v = self.journal.position.file, self.version
        step = LoggedStep(version=v, groups=[ids], outcomes=told, number=v, journal_file=number)
        self.step_log.append(step)
        digests = dict.fromkeys(StepDigests.__dataclass_fields__, "0" * 16)
        self.checksums.log(step, StepDigests(**digests))  # pyright: ignore[reportArgumentType]
        self.index.trained([group], step=v)
        self.index.close_below(v)
        self.metrics.log(v, {"loss/policy": 1.0})
        if v % EVERY == 0:
            self.oldest_version = max(0, v - (KEPT - 1) * EVERY)
            self.saving.settle()

    def num_bytes(self) -> int:
        files = self.run_dir.root.rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())


@pytest.mark.slow
def test_long_run_stays_bounded_and_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_BYTES", 20_000)
    run, sizes = LongRun(tmp_path), list[int]()
    for _ in range(NUM_STEPS):
        run.step()
        sizes.append(run.num_bytes())
    third = NUM_STEPS // 3
    assert max(sizes[-third:]) < 1.1 * max(sizes[third:-third])
    steps = list(read_steps(run.run_dir.steps))
    assert load_pruned(run.run_dir.journal).before > 10
    assert 1 < steps[0].version < run.oldest_version
    start = load_replay_point(run.run_dir.replay_point, version=run.oldest_version)
    again = StepLog(run.run_dir.steps, start=start.steps_offset)
    asked = {"version": run.oldest_version, "num_batches": run.oldest_version}
    needed = steps_since(run.run_dir, start=start, **asked)
    assert [step.version for step in needed] == list(range(run.oldest_version + 1, NUM_STEPS + 1))
    there = {t.episode_id for _, t in read_journal(run.run_dir.journal, start=start.position)}
    assert there.issuperset(name for step in needed for ids in step.groups for name in ids)
    with pytest.raises(ConfigError, match=f"steps up to {steps[0].version - 1} were pruned"):
        list(read_steps(run.run_dir.steps, start=1))
    for each in (again, run.step_log, run.checksums, run.metrics, run.journal):
        each.close()


def test_outcome_file_drops_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_OUTCOMES_BYTES", 2_000)
    news: list[list[str]] = []
    core = SimpleNamespace(lifecycle=SimpleNamespace(news=news), version=3)
    parts: Any = SimpleNamespace(core=core, run_dir=RunDir(root=tmp_path))
    path = parts.run_dir.outcomes
    for number in range(500):
        news.append([f"g{number:07d}/0", "trained", ""])
        scheduler_module.write_outcomes(parts)
        assert path.stat().st_size <= 2_100
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row[0] for row in rows] == [f"g{n:07d}/0" for n in range(500 - len(rows), 500)]
    assert len(rows) >= 20
