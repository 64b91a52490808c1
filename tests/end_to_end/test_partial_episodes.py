"""Laws of a run that trains episodes in parts, with a real engine and a killed role."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from actor.rollout.recording import TURNS, read_events
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.journal import read_journal
from learner.recovery.resume import with_parts
from learner.recovery.step_log import PartName, read_steps
from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

MAX_LAG = 2
NUM_TURNS = 80  # At least so many turns of a long episode, which this policy does not solve.
OVERRIDES = (
    "model.path=configs/policies/tiny",
    # Episodes of few turns decide the steps; those of up to 96 turns last for several.
    "tasks=[{env: rooms, subset: Trek, distance: [1, 4], weight: 0.8},"
    " {env: rooms, subset: Trek, distance: [40, 48], weight: 0.2}]",
    "horizon.kind=fixed",
    "horizon.stages=[96]",
    "eval.before=false",
    "eval.after=false",
    "train.num_steps=100000",
    "algorithm.advantage=ppo",
    "algorithm.filter_zero_variance=false",
    f"learner.max_lag_steps={MAX_LAG}",
    "learner.partial_episodes=turns",
    "learner.lr=1e-5",
    "learner.muon_lr=1e-5",
    "learner.checkpoint_every_steps=5",
    "scheduler.max_stretch=1",
    "actor.context=window",
    "actor.context_turns=4",
    "actor.max_concurrent=32",
    "groups.size=2",
    "groups.per_step=1",
    "scheduler.max_ahead_steps=4",
    "scheduler.gate_margin=0",
)
# Episode, turn, place in the turn, version, id and log-probability.
Token = tuple[str, int, int, int, int, float]


def test_parts_are_trained_once_when_the_learner_is_killed(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until(lambda: num_early(run) >= 2)
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        before = num_early(run)
        run.wait_until(lambda: num_early(run) > before)
        run.process.send_signal(signal.SIGTERM)
        run.wait(timeout_s=120)
    trained = Counter(trained_tokens(run))
    assert trained
    assert set(trained.values()) == {1}
    assert balances(run.read("ledger.json"))
    command = [sys.executable, "run.py", "recompute", str(run.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_are_trained_once_when_the_actor_is_killed(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until(lambda: bool(running(run).keys() & early_parts(run).keys()))
        os.kill(run.role_pid("actor"), signal.SIGKILL)
        killed = running(run)
        assert killed.keys() & early_parts(run).keys()
        run.wait_until(lambda: bool(continued(run, killed)))
        run.process.send_signal(signal.SIGTERM)
        run.wait(timeout_s=120)
    trained = Counter(trained_tokens(run))
    assert set(trained.values()) == {1}
    assert balances(run.read("ledger.json"))
    for parts in early_parts(run).values():
        for part, later in pairwise(parts):
            assert later.first_turn >= part.end_turn  # The episode did not begin anew.


def continued(run: Run, killed: dict[str, int]) -> list[PartName]:
    """Return the early parts of killed episodes with turns of the next actor.

    Args:
        killed: turns that the killed actor recorded, by episode.
    """
    return [
        later
        for name, parts in early_parts(run).items()
        for part, later in pairwise(parts)
        if name in killed and part.end_turn <= killed[name] < later.end_turn
    ]


def early_parts(run: Run) -> dict[str, list[PartName]]:
    """Return the parts that steps have trained before their groups, by episode."""
    path = run.root / "journal" / "steps.jsonl"
    steps = read_steps(path) if path.is_file() else []
    parts: dict[str, list[PartName]] = {}
    for name in (PartName.parse(name) for step in steps for ids in step.groups for name in ids):
        if name.is_early:
            parts.setdefault(name.episode_id, []).append(name)
    return parts


def running(run: Run) -> dict[str, int]:
    """Return the recorded turns of the episodes in the first half of their turns."""
    num_turns: dict[str, int] = {}
    for path in (run.root / "episodes").glob(f"*{TURNS}"):
        with suppress(FileNotFoundError):  # The episode was acknowledged meanwhile.
            events = read_events(path)
            if events is not None and not events.is_over and events.num_steps < NUM_TURNS / 2:
                num_turns[events.head["episode_id"]] = events.num_steps
    return num_turns


def num_early(run: Run) -> int:
    """Return the parts that were trained before their groups."""
    return sum(int(line["parts/early"]) for line in run.metrics())


def trained_tokens(run: Run) -> Iterator[Token]:
    """Yield the tokens in the losses of all steps."""
    records = read_journal(run.root / "journal")
    episodes = {each.episode_id: each for _, each in records if each.kind is EpisodeKind.TRAIN}
    for step in read_steps(run.root / "journal" / "steps.jsonl"):
        if step.is_skipped:
            continue
        names = [name for ids in step.groups for name in ids]
        parts = with_parts(episodes, names, RunDir(root=run.root))
        assert parts.keys() == set(names)
        for part in parts.values():
            yield from sampled_tokens(part, version=step.version)


def sampled_tokens(part: Trajectory, *, version: int) -> Iterator[Token]:
    """Yield the sampled tokens of a part that the step to `version` trained."""
    columns = (part.turn_ids, part.versions, part.token_ids, part.logprobs)
    rows = zip(*(column[part.loss_mask].tolist() for column in columns), strict=True)
    num_in_turn = Counter[int]()
    for turn, sampled, token_id, logprob in rows:
        assert version - 1 - sampled <= MAX_LAG
        yield part.episode_id, turn, num_in_turn[turn], sampled, token_id, logprob
        num_in_turn[turn] += 1
