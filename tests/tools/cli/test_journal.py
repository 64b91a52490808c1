"""Laws of the command `journal`, and of what keeps a journal small."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

import run
from common.config.journal import JournalSection
from common.store.run_dir import RunDir, write_json
from learner.journal.journal import (
    JournalPosition,
    JournalWriter,
    journal_files,
    load_pruned,
    read_journal,
)
from learner.journal.upkeep import RetentionLimits, Upkeep, prune_old
from learner.recovery.reward_log import GroupReward, RewardLog
from tests.learner.journal.test_journal import make_trajectory

NUM = 5


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with an episode in each of five files; a restart reads from the fourth on."""
    made = RunDir(root=tmp_path / "r")
    writer = JournalWriter(made.journal, max_file_bytes=1)
    for number in range(NUM):
        writer.append(make_trajectory(f"g{number:07d}/0"))
    writer.close()
    steps = [{"version": 1, "groups": [["g0000000/0"]], "outcomes": []}]
    made.steps.write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    write_json(made.replay_point, {"position": {"segment": 3, "offset": 0}})
    return made


def carry_out(run_dir: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run.main(["journal", str(run_dir.root), *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_list_shows_files_needed_by_a_restart(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = carry_out(run_dir, capsys, "list")
    lines = text.splitlines()
    assert code == 0
    assert [line[:6] for line in lines[:NUM]] == [f"{i:06d}" for i in range(NUM)]
    assert ["needed by a restart" in line for line in lines[:NUM]] == [False] * 3 + [True] * 2


def test_verify_reports_damage_and_continues(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = carry_out(run_dir, capsys, "verify")
    assert code == 0
    assert f"{NUM} episodes in {NUM} files, no problems" in text
    path = run_dir.journal / "000000.log"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    code, text = carry_out(run_dir, capsys, "verify")
    assert code == 1
    assert "damaged: g0000000/0: a step trained it, but the journal lacks it" in text
    assert f"damaged: {path}: no valid record from offset 0" in text
    assert f"{NUM - 1} episodes" in text


def test_export_writes_episodes_with_their_consuming_step(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _ = carry_out(run_dir, capsys, "export", f"to={tmp_path / 'all.jsonl'}")
    rows = [
        json.loads(line)
        for line in (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert code == 0
    assert [row["episode_id"] for row in rows] == [f"g{i:07d}/0" for i in range(NUM)]
    assert [row["step"] for row in rows] == [1, None, None, None, None]
    assert rows[0]["token_ids"] == [1, 2, 3]
    assert rows[4]["segment"] == 4


def test_export_has_the_rewards_of_groups(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (member, *_) = [trajectory for _, trajectory in read_journal(run_dir.journal)]
    log = RewardLog(run_dir.group_rewards)
    log.append(GroupReward(group_id=member.group_id, rewards={member.member: 0.25}))
    log.close()
    assert carry_out(run_dir, capsys, "export", f"to={tmp_path / 'all.jsonl'}")[0] == 0
    lines = (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    wanted = [(0.25 if row["member"] == member.member else None) for row in rows]
    assert [row["group_reward"] for row in rows] == wanted


def test_prune_keeps_the_files_of_a_restart(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = carry_out(run_dir, capsys, "prune", "keep_gb=0")
    assert code == 0
    assert "3 files pruned" in text
    assert list(journal_files(run_dir.journal)) == [3, 4]
    assert [t.episode_id for _, t in read_journal(run_dir.journal)] == ["g0000003/0", "g0000004/0"]
    assert carry_out(run_dir, capsys, "verify")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "to=x"], "to: list has no such option"),
        (["frobnicate"], "journal RUN list|verify|export|prune"),
        (["export"], "export needs to=FILE"),
        (["prune"], "prune needs keep_gb=N or keep_days=N"),
        (["prune", "keep_gb=-1"], "keep_gb=-1: must be a number >= 0"),
        (["prune", "keep_days=nan"], "keep_days=nan: must be"),
    ],
)
def test_wrong_usage_error_shows_correct_usage(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, text = carry_out(run_dir, capsys, *words)
    assert code == 2
    assert said in text


def test_oldest_files_go_by_size_and_age(run_dir: RunDir) -> None:
    paths = journal_files(run_dir.journal)
    size = paths[0].stat().st_size
    prune_old(run_dir.journal, RetentionLimits(), before=NUM)
    assert len(journal_files(run_dir.journal)) == NUM
    prune_old(run_dir.journal, RetentionLimits(keep_bytes=4.5 * size), before=NUM)
    assert list(journal_files(run_dir.journal)) == [1, 2, 3, 4]
    os.utime(paths[1], (time.time() - 100, time.time() - 100))
    prune_old(run_dir.journal, RetentionLimits(keep_s=50), before=NUM)
    assert list(journal_files(run_dir.journal)) == [2, 3, 4]
    prune_old(run_dir.journal, RetentionLimits(keep_bytes=0), before=3)
    assert list(journal_files(run_dir.journal)) == [3, 4]
    assert load_pruned(run_dir.journal).before == 3


def test_upkeep_packs_settled_files_transparently(run_dir: RunDir) -> None:
    upkeep = Upkeep(run_dir.journal, JournalSection())
    upkeep.start()
    reader = read_journal(run_dir.journal)
    next(reader)
    upkeep.settled(JournalPosition(file=3))
    deadline = time.monotonic() + 60.0
    while len(list(run_dir.journal.glob("*.gz"))) < 3 or len(journal_files(run_dir.journal)) > NUM:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    upkeep.stop()
    assert not upkeep.is_alive()
    packed = [path.name for path in journal_files(run_dir.journal).values()]
    assert packed == [*(f"00000{i}.log.gz" for i in range(3)), "000003.log", "000004.log"]
    assert len(list(reader)) == NUM - 1
    assert len(list(read_journal(run_dir.journal))) == NUM
