"""Laws of episodes at the limits of a message, against a real learner's socket."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.delivery import ARRAYS, Delivery, deliverable
from common.segments import segments_of
from common.wire.access.bounds import MAX_FRAME_BYTES
from common.wire.codec import decode
from common.wire.messages import Ack, EndReason, Trajectory
from learner.ingest.intake import refusal
from tests.actor import toy_peer
from tests.actor.toy_peer import Law, Peer
from tests.learner.builders import make_trajectory

NUM_SEGMENTS = 12
LARGEST = MAX_FRAME_BYTES // 4  # tokens of an episode, of four bytes each


def episode(num_tokens: int, *, member: int = 0, **changes: Any) -> Trajectory:
    mask = np.zeros(num_tokens, dtype=bool)
    mask[1::2] = True
    return make_trajectory([1] * num_tokens, mask.tolist(), member=member, **changes)


def check(tmp_path: Path, law: Law[Delivery], *, window: int = 1) -> None:
    def connect(peer: Peer, context: Any) -> Delivery:
        return Delivery(peer.run_dir, peer.keys, window=window, context=context)

    toy_peer.check(tmp_path, "learner", connect, law)


@pytest.mark.slow
def test_million_token_segmented_episode_arrives_intact(tmp_path: Path) -> None:
    num_tokens = 1_200_000
    starts = np.arange(NUM_SEGMENTS, dtype=np.int32) * (num_tokens // NUM_SEGMENTS)
    sent = episode(num_tokens, segment_starts=starts)

    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(sent)
        (received,) = await learner.receive(1, timeout_s=60.0)
        got = received.message
        assert got.end_reason is EndReason.DONE
        assert [each.start for each in segments_of(got)] == starts.tolist()
        for name in (*ARRAYS, "segment_starts"):
            assert np.array_equal(getattr(got, name), getattr(sent, name)), name

    check(tmp_path, law)


@pytest.mark.slow
def test_oversized_episode_fails_and_frees_its_slot(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(LARGEST + 1))
        (received,) = await learner.receive(1, timeout_s=60.0)
        failed = received.message
        assert (failed.episode_id, failed.end_reason) == ("g0/0", EndReason.TOO_LARGE)
        assert "33554436 bytes is over the size limit of 33554432" in failed.error
        assert (failed.reward, failed.is_success, failed.num_turns) == (0.0, False, 0)
        answer = Ack(episode_id="g0/0", is_accepted=True, reason="")
        learner.answer(received, answer)
        async with asyncio.timeout(60.0):
            await delivery.put(episode(4, member=1))
        (following,) = await learner.receive(1)
        assert following.message.episode_id == "g0/1"

    check(tmp_path, law)


def test_unsendable_episode_is_admitted_as_a_failure() -> None:
    failed, frames = deliverable(episode(4, reward=float("nan")))
    assert failed.end_reason is EndReason.ABORTED
    assert failed.end_reason.is_infrastructure_failure
    assert "reward" in failed.error
    assert decode(frames).identity() == failed.identity()
    assert refusal(failed, learner_version=0, max_group_size=4) == ""


def test_episode_within_limits_is_sent_unchanged() -> None:
    sent = episode(6)
    kept, frames = deliverable(sent)
    assert kept is sent
    assert decode(frames).token_ids.tolist() == [1] * 6
