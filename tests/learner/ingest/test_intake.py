"""Laws of the intake, between a real actor's socket and a real scheduler's."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from actor.delivery import deliverable
from common.wire.access.bounds import MAX_FRAME_BYTES
from common.wire.access.lease_mac import lease_mac
from common.wire.codec import decode, encode
from common.wire.messages import (
    Ack,
    EndReason,
    EpisodeKind,
    EpisodeOutcome,
    Heartbeat,
    Outcome,
    Progress,
    Rejected,
)
from learner.ingest import buffer
from learner.journal.journal import JOURNAL_START, read_journal
from tests.full_disk import no_room_beyond
from tests.learner.builders import make_episode, so_far
from tests.learner.ingest.intake_rig import HELLO, VOCAB_SIZE, Setup, member


def test_acknowledged_trajectory_is_on_disk(running: Setup) -> None:
    running.journal.gate.clear()
    running.actor.send_multipart(encode(member(0)))
    assert not running.actor.poll(200), "acknowledged before the sync"
    running.journal.gate.set()
    ack = decode(running.actor.recv_multipart())
    assert ack == Ack(episode_id="g/0", is_accepted=True, reason="")
    assert running.journaled() == ["g/0"]
    (record,) = [t for _, t in read_journal(running.run_dir.journal)]
    assert record.token_ids.tolist() == [1, 2]


def test_duplicate_is_acknowledged_and_counted_but_not_rewritten(running: Setup) -> None:
    for _ in range(3):
        assert running.deliver(member(0)).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.num_duplicates == 2)
    assert running.journaled() == ["g/0"]
    assert running.scheduler.seen == ["g/0"]
    assert running.admission.counts()["admission/duplicates"] == 2


def test_concurrent_trajectories_are_judged_singly(running: Setup) -> None:
    bad = replace(member(1), logprobs=np.array([0, np.nan], dtype=np.float32))
    running.journal.gate.clear()
    for each in (member(0), bad, member(0), member(2), bad):
        running.actor.send_multipart(encode(each))
    running.journal.gate.set()
    told: list[tuple[str, bool]] = []
    while len(told) < 5:
        answer = decode(running.actor.recv_multipart())
        told += [(each, answer.is_accepted) for each in (answer.episode_id, *answer.others)]
    assert sorted(told) == [
        *(("g/0", True), ("g/0", True), ("g/1", False), ("g/1", False), ("g/2", True))
    ]
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    assert running.journaled() == ["g/0", "g/2"]
    assert running.scheduler.num_duplicates == 1
    assert running.scheduler.outcomes == {"g/1": ("failed", "refused")}


def test_acceptances_of_one_sender_share_acknowledgements(running: Setup) -> None:
    running.journal.gate.clear()
    running.actor.send_multipart(encode(member(0)))  # It waits for the disk while more arrive.
    for number in range(1, 3):
        running.actor.send_multipart(encode(member(number)))
    with running.other_actor() as other:
        other.send_multipart(encode(member(0, group_id="h")))
        assert not other.poll(300)
        running.journal.gate.set()
        told: list[str] = []
        num_messages = 0
        while len(told) < 3:
            answer = decode(running.actor.recv_multipart())
            told += [answer.episode_id, *answer.others]
            num_messages += 1
        assert sorted(told) == ["g/0", "g/1", "g/2"]
        assert num_messages < 3
        assert decode(other.recv_multipart()).episode_id == "h/0"


def test_refused_trajectory_gets_its_reason_and_is_not_journaled(running: Setup) -> None:
    bad = replace(member(2), logprobs=np.array([0, np.nan], dtype=np.float32))
    ack = running.deliver(bad)
    assert not ack.is_accepted
    assert ack.reason == "a sampled token has a logprob that is NaN or infinite"
    assert running.journaled() == []
    for number in range(2):
        running.deliver(member(number))
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    assert running.scheduler.outcomes == {"g/2": ("failed", "refused")}
    assert running.admission.counts()["admission/refused"] == 1


def test_part_is_trained_and_neither_journalled_nor_acknowledged(tmp_path: Path) -> None:
    key = b"of scheduler and learner"
    setup = Setup(tmp_path, lease_key=key, trains_early=True)
    setup.intake.start()
    whole = make_episode([0, 0], name="g0000001")
    part = so_far(replace(whole, lease_mac=lease_mac(whole, whole.actor, key)), 1)
    bad = replace(part, turn_ids=part.turn_ids + 1)
    for each in (replace(part, lease_mac="no"), bad, part):
        setup.actor.send_multipart(encode(each))
    for number in range(3):
        own = member(number)
        assert setup.deliver(replace(own, lease_mac=lease_mac(own, own.actor, key))).is_accepted
    (group, early), _ = setup.next_batch(version=1)
    assert (group.group_id, early.is_early) == ("g", True)
    assert early.members[0].token_ids.tolist() == part.token_ids.tolist()
    assert setup.journaled() == ["g/0", "g/1", "g/2"]
    assert sum(setup.router.num_refused("trajectories").values()) == 2
    assert setup.scheduler.outcomes == {}
    setup.close()


def test_unleased_episode_is_refused_without_report(tmp_path: Path) -> None:
    key, own = b"of scheduler and learner", member(0)
    setup = Setup(tmp_path, lease_key=key)
    setup.intake.start()
    leased = replace(own, lease_mac=lease_mac(own, own.actor, key))
    forged = [
        own,  # never leased
        replace(leased, actor="actor-9"),  # The lease belongs to another actor.
        replace(leased, horizon=own.horizon + 1),
        replace(leased, seed=own.seed + 1),
        replace(leased, episode_id="g/1", member=1),
        replace(own, lease_mac=lease_mac(own, own.actor, b"an actor's guess")),
    ]
    for each in forged:
        ack = setup.deliver(each)
        assert not ack.is_accepted
        assert "the lease signature is not valid" in ack.reason
    assert setup.deliver(leased).is_accepted
    setup.scheduler.pump_until(lambda: setup.scheduler.seen == ["g/0"])
    assert setup.scheduler.outcomes == {}, "nobody else's episode fails by that"
    assert setup.journaled() == ["g/0"]
    assert setup.admission.counts()["admission/forged"] == len(forged)
    assert setup.router.num_refused("trajectories") == {"trajectories/run/forbidden": len(forged)}
    setup.close()


def test_token_outside_vocabulary_never_reaches_journal(running: Setup) -> None:
    bad = replace(member(0), token_ids=np.array([1, VOCAB_SIZE], dtype=np.int32))
    ack = running.deliver(bad)
    assert ack.reason == "token id 100 is outside the vocabulary of 100 tokens"
    assert running.journaled() == []


def test_late_episode_of_a_settled_group_is_a_duplicate(running: Setup) -> None:
    running.deliver(member(0, group_id="g0000003"))
    running.scheduler.told.save(closed_below=4)
    running.scheduler.pump_beats(2)
    assert running.deliver(member(1, group_id="g0000003")).is_accepted
    assert running.deliver(member(1, group_id="g0000004")).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.num_duplicates == 1)
    assert running.journaled() == ["g0000003/0", "g0000004/1"]


def test_members_given_up_by_the_scheduler_complete_a_group(running: Setup) -> None:
    for number in (0, 2):
        running.deliver(member(number))
    running.scheduler.revoked = ["g/1"]
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    groups, _ = running.next_batch()
    assert [t.member for t in groups[0].members] == [0, 2]
    assert running.deliver(member(1)).is_accepted
    running.scheduler.pump_until(lambda: "g/1" in running.scheduler.outcomes)
    assert running.scheduler.outcomes["g/1"] == ("failed", "late")
    assert running.buffer.drain_stats()["groups/open"] == 0


def test_evaluation_is_journaled_outside_groups(running: Setup) -> None:
    for number in range(3):
        running.deliver(replace(member(number), kind=EpisodeKind.EVAL))
    running.scheduler.pump_until(lambda: len(running.scheduler.seen) == 3)
    assert len(running.journaled()) == 3
    metrics = running.buffer.drain_stats()
    assert metrics["groups/ready"] == metrics["groups/open"] == metrics["episodes/arrived"] == 0


def test_something_else_than_a_trajectory_is_rejected(running: Setup) -> None:
    running.actor.send_multipart(encode(HELLO))
    answer = decode(running.actor.recv_multipart())
    assert answer == Rejected(reason="the learner accepts trajectories here, not Hello")
    assert running.deliver(member(0)).is_accepted


def test_batch_timeout_reports_ready_groups(running: Setup) -> None:
    running.deliver(member(0))
    running.scheduler.pump_until(lambda: running.scheduler.seen == ["g/0"])
    with pytest.raises(TimeoutError, match="0 groups are complete, 1 group is incomplete"):
        running.next_batch(timeout_s=0.01)


def test_stale_episodes_before_a_timeout_come_with_the_next_batch(running: Setup) -> None:
    scheduler = running.scheduler
    for number in range(3):
        running.deliver(member(number, group_id="old"))
    scheduler.pump_until(lambda: scheduler.groups == {"old": True})
    with pytest.raises(TimeoutError):
        running.next_batch(5, timeout_s=0.01)
    scheduler.pump_until(lambda: len(scheduler.outcomes) == 3)
    assert scheduler.outcomes["old/0"] == ("stale", "lag")
    running.buffer.step_done(5, is_last=False, max_ahead_steps=1, signals={})
    for number in range(3):
        running.deliver(member(number, group_id="new", version=5))
    groups, stale = running.next_batch(5)
    assert groups[0].group_id == "new"
    assert [o.episode_id for o in stale] == ["old/0", "old/1", "old/2"]


def test_adopted_episodes_are_known_and_join_their_groups(setup: Setup) -> None:
    scheduler = setup.scheduler
    failed = replace(member(1, group_id="done"), end_reason=EndReason.ENV_ERROR)
    trained = EpisodeOutcome(episode_id="done/0", outcome=Outcome.TRAINED, cause="")
    setup.buffer.report([trained])
    setup.buffer.adopt(failed, JOURNAL_START, step=None)
    setup.buffer.adopt(member(0, group_id="done"), JOURNAL_START, step=1)
    setup.buffer.adopt(member(2, group_id="done"), JOURNAL_START, step=1)
    for number in range(2):
        setup.buffer.adopt(member(number, group_id="open"), JOURNAL_START, step=None)
    setup.intake.start()
    assert setup.deliver(member(0, group_id="open")).is_accepted
    setup.deliver(member(2, group_id="open"))
    scheduler.pump_until(lambda: scheduler.groups == {"done": True, "open": True})
    assert scheduler.outcomes == {"done/0": ("trained", ""), "done/1": ("failed", "env_error")}
    assert scheduler.num_duplicates == 1
    assert setup.journaled() == ["open/2"]
    groups, _ = setup.next_batch()
    assert [group.group_id for group in groups] == ["open"]


def test_replay_point_moves_to_the_end_when_all_is_settled(running: Setup) -> None:
    for number in range(3):
        running.deliver(member(number, group_id="g0000000"))
    assert running.buffer.replay_point(version=0).position == JOURNAL_START
    running.scheduler.told.save(closed_below=1)
    running.scheduler.pump_beats(2)
    replay_point = running.buffer.replay_point(version=0)
    assert replay_point.position == running.journal.position > JOURNAL_START
    assert replay_point.closed_below == 1


def test_replay_point_precedes_episode_in_intake(running: Setup) -> None:
    running.deliver(member(0, group_id="g0000000"))
    running.scheduler.told.save(closed_below=1)
    running.scheduler.pump_beats(2)
    end = running.journal.position
    running.journal.is_syncing.clear()
    running.journal.gate.clear()
    running.actor.send_multipart(encode(member(0, group_id="g0000001")))
    assert running.journal.is_syncing.wait(60.0)
    assert running.journal.position > end  # It is appended but not acknowledged.
    assert running.buffer.replay_point(version=0).position == end
    running.journal.gate.set()
    assert decode(running.actor.recv_multipart()).is_accepted
    assert running.buffer.replay_point(version=0).position == end


def test_full_disk_pauses_the_intake_and_loses_nothing(
    running: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    running.deliver(member(0))
    long = replace(member(1), error="x" * 200_000)
    with no_room_beyond(150_000):
        running.actor.send_multipart(encode(long))
        heard = lambda: [m for m in running.scheduler.heard if isinstance(m, Heartbeat)]  # noqa: E731
        running.scheduler.pump_until(
            lambda: any("disk: no room" in each.waiting_for for each in heard()[-1:])
        )
        assert not running.actor.poll(0), "acknowledged, and not on disk"
        assert running.journaled() == ["g/0"]
        assert "the writer waits and loses nothing" in caplog.text
    running.scheduler.pump_until(lambda: running.actor.poll(0) != 0)
    assert decode(running.actor.recv_multipart()).is_accepted
    assert running.journaled() == ["g/0", "g/1"]
    running.scheduler.pump_until(lambda: not heard()[-1].waiting_for)
    assert running.deliver(member(2)).is_accepted


def test_batch_timeout_starts_with_first_engine(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No actor can play before: the engine of a large model starts slowly."""
    began = now = float(int(time.monotonic()) + 1)
    patience_s, starting_s = 2.0, 8.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(buffer, "time", clock)

    def hear() -> None:
        nonlocal now
        now += 1.0  # A poll takes a second of this clock.
        is_up = now - began > starting_s
        told = Progress(run_epoch="e", revoked=[], is_finished=False, num_slots=8 * is_up)
        setup.buffer.apply(told)

    with pytest.raises(TimeoutError, match="no batch"):
        setup.buffer.next_batch(
            0, max_lag_steps=1, in_order=False, timeout_s=patience_s, check=hear
        )
    assert now - began == starting_s + patience_s


def test_oversized_episode_fails_with_its_cause(running: Setup) -> None:
    whole = np.zeros(MAX_FRAME_BYTES // 4 + 1, dtype=np.int32)
    _, frames = deliverable(replace(member(2), token_ids=whole))
    running.actor.send_multipart(frames)
    assert decode(running.actor.recv_multipart()).is_accepted
    for number in range(2):
        assert running.deliver(member(number)).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    assert running.scheduler.outcomes == {"g/2": ("failed", "too_large")}
