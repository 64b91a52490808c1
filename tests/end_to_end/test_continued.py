"""Laws of a killed actor in a run of real processes: its episodes continue, token for token."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from actor.rollout.recording import TURNS, EpisodeEvents, read_events
from common.wire.messages import Trajectory
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

NUM_STEPS = 12  # Steps of an episode when its actor is killed.
OVERRIDES = (
    "tasks=[{env: rooms, subset: Carry}]",
    "horizon.stages=[48]",
    "eval.before=false",
    "eval.after=false",
    "train.num_steps=100000",
    "learner.lr=1e-7",  # A run of this policy has no success here.
    "learner.muon_lr=1e-7",
    "actor.max_concurrent=8",
    "learner.max_lag_steps=50",
)


def records(run: Run) -> dict[str, EpisodeEvents]:
    """Return the records of running episodes with some steps, by episode."""
    events: list[EpisodeEvents | None] = []
    for path in (run.root / "episodes").glob(f"*{TURNS}"):
        with suppress(FileNotFoundError):  # Its episode has just ended.
            events.append(read_events(path))
    return {
        each.head["episode_id"]: each
        for each in events
        if each is not None and len(each.steps) >= NUM_STEPS and not each.is_over
    }


def journalled(run: Run) -> dict[str, Trajectory]:
    return {each.episode_id: each for _, each in read_journal(run.root / "journal")}


def continued_in(run: Run, recorded: dict[str, EpisodeEvents]) -> dict[str, Trajectory]:
    """Return the recorded episodes that ended after the kill, and not shortly before it."""
    ended = journalled(run)
    return {k: v for k, v in ended.items() if k in recorded and v.attempt == 1}


def test_episodes_of_a_killed_actor_continue(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until(lambda: len(records(run)) >= 2)
        os.kill(run.role_pid("actor"), signal.SIGKILL)
        recorded = records(run)
        run.wait_until(lambda: bool(continued_in(run, recorded)))
        run.process.send_signal(signal.SIGTERM)
        run.wait(timeout_s=60.0)
        continued = continued_in(run, recorded)
    for episode_id, trajectory in continued.items():
        turns = recorded[episode_id].turns[: recorded[episode_id].steps[-1].num_turns]
        tokens = [token for turn in turns for token in turn.token_ids]
        versions = [version for turn in turns for version in turn.versions]
        sampled = trajectory.loss_mask
        assert trajectory.token_ids[sampled][: len(tokens)].tolist() == tokens
        assert trajectory.versions[sampled][: len(tokens)].tolist() == versions
        assert trajectory.num_turns > len(turns)
    assert balances(run.read("ledger.json"))
