"""Laws of publishing: a real publisher against actors made of real sockets and groups."""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import zmq

from common.weights import transport as weight_group
from common.weights.messages import CanaryScores
from common.wire.codec import decode, encode
from common.wire.messages import Rejected
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import Router, connect_dealer
from learner.weights.canary import Canary
from learner.weights.publisher import Publisher
from learner.weights.source import PublishedWeights
from learner.weights.transfer import PublishSettings
from tests.bounds import at_most
from tests.learner.builders import snapshot
from tests.learner.weights.toy_actor import CANARY, CANARY_LOGPROBS, HOST, Actor, run_actor

TIMEOUT_S = 60.0  # a transfer's deadline that no test may wait for
SHORT_S = 2.0  # the deadline of those that are about it
SILENCE_S = 2.0  # The scheduler marks an actor as silent after this time.
PATIENCE_S = 3.0  # The learner's limit for silent or stuck engines.


def make_weights(version: int, *, num: int = 8) -> PublishedWeights:
    """Weights that are full of their version's number."""
    return snapshot(
        version,
        [("w", torch.full((num,), float(version))), ("b", torch.full((3,), version).bfloat16())],
        canary_token_ids=CANARY,
        canary_logprobs=CANARY_LOGPROBS,
    )


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return create_keys(tmp_path / "keys")


@pytest.fixture
def timeout_s() -> float:
    return TIMEOUT_S


with_short_deadline = pytest.mark.parametrize("timeout_s", [SHORT_S])


@pytest.fixture
def publisher(
    keys: RunKeys, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Publisher]:
    """Its transfers, and those of actors beside it, are as urgent here as other tests' work."""
    monkeypatch.setattr(weight_group, "TRANSFER_NICENESS", 0)
    router = Router(keys, host=HOST, port=0)
    settings = PublishSettings(
        host=HOST, timeout_s=timeout_s, max_canary_delta=0.05, silent_after_s=PATIENCE_S
    )
    publisher = Publisher(router, settings)
    publisher.start()
    yield publisher
    publisher.stop()
    assert not publisher.is_alive()


Start = Callable[..., Actor]
Launch = Callable[[str, str], BaseProcess]


@pytest.fixture
def start_actor(keys: RunKeys, publisher: Publisher) -> Iterator[Start]:
    """Yields a function that starts an actor; it returns once the actor has version 0."""
    actors: list[Actor] = []

    def start(name: str = "a", **habits: object) -> Actor:
        actors.append(Actor(keys, publisher.port, name, **habits))  # type: ignore[arg-type]
        actors[-1].start()
        actors[-1].wait_for(0)
        return actors[-1]

    yield start
    for actor in actors:
        actor.stop()


def eventually(condition: Callable[[], bool], *, within_s: float = 60.0) -> bool:
    """True as soon as the condition holds, False if it does not in time."""
    deadline, never = time.monotonic() + within_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        never.wait(0.01)
    return True


def test_canary_does_not_retain_the_weights() -> None:
    canary, weights = Canary(max_delta=0.1), make_weights(0)
    buffer = weakref.ref(weights.source)
    canary.expect(weights)
    del weights
    assert buffer() is None
    canary.compare(CanaryScores(actor="a", version=0, logprobs=CANARY_LOGPROBS))
    assert canary.drain_metrics()["weights/canary_abs_logprob"] == 0.0


@pytest.mark.timed
def test_publishing_without_members_returns_at_once(publisher: Publisher) -> None:
    started = time.monotonic()
    publisher.publish(make_weights(0))
    assert time.monotonic() - started < at_most(SHORT_S)
    assert publisher.drain_metrics()["weights/members"] == 0


def test_every_version_reaches_every_actor_and_late_joiners(
    publisher: Publisher, start_actor: Start, keys: RunKeys
) -> None:
    publisher.publish(make_weights(0))
    first, second = start_actor("first"), start_actor("second")
    for version in (1, 2):
        publisher.publish(make_weights(version))
        for actor in (first, second):
            assert actor.loaded[-1] == version, "publish returned too early"
            assert actor.wait_for(version) == float(version)
    late = Actor(keys, publisher.port, "late")
    late.start()
    assert late.wait_for(2) == 2.0
    assert late.loaded == [2]
    late.stop()
    metrics = publisher.drain_metrics()
    assert metrics["weights/members"] == 3
    assert metrics["publish/pause_s"] == 0.25
    assert metrics["weights/canary_abs_logprob"] == 0.0


with_an_odd_actor = pytest.mark.parametrize(
    ("habit", "odd_from"), list(product(["silent", "vanish"], [1, 2]))
)


@pytest.mark.slow
@with_short_deadline
@with_an_odd_actor
@pytest.mark.timed
def test_dying_actor_costs_bounded_time_once(
    publisher: Publisher, start_actor: Start, habit: str, odd_from: int
) -> None:
    publisher.publish(make_weights(0))
    start_actor("bad", habit=habit, odd_from=odd_from)
    good = start_actor("good")
    for version in range(1, odd_from + 1):
        started = time.monotonic()
        publisher.publish(make_weights(version))
    assert time.monotonic() - started < at_most(2.9 * SHORT_S)
    assert good.wait_for(odd_from) == float(odd_from)
    assert publisher.drain_metrics()["weights/members"] == 1
    started = time.monotonic()
    publisher.publish(make_weights(odd_from + 1))
    assert time.monotonic() - started < at_most(SHORT_S), "the dead cost once"
    assert good.wait_for(odd_from + 1) == odd_from + 1


@pytest.mark.slow
@with_short_deadline
@pytest.mark.timed
def test_several_vanishing_actors_cost_no_more_than_one(
    publisher: Publisher, start_actor: Start
) -> None:
    publisher.publish(make_weights(0))
    for number in range(3):
        start_actor(f"bad-{number}", habit="vanish")
    good = start_actor("good")
    started = time.monotonic()
    publisher.publish(make_weights(1))
    assert time.monotonic() - started < at_most(2.9 * SHORT_S)
    assert good.wait_for(1) == 1.0
    assert publisher.drain_metrics()["weights/members"] == 1


@pytest.mark.timed
def test_publisher_ignores_departed_actors(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    leaver, good = start_actor("leaver"), start_actor("good")
    publisher.publish(make_weights(1))
    leaver.leave()
    started = time.monotonic()
    publisher.publish(make_weights(2))
    assert time.monotonic() - started < at_most(SILENCE_S)
    assert good.loaded == [0, 1, 2]
    assert publisher.drain_metrics()["weights/members"] == 1


@with_an_odd_actor
@pytest.mark.timed
def test_publisher_waits_for_a_silent_actor_until_marked(
    publisher: Publisher, start_actor: Start, habit: str, odd_from: int
) -> None:
    publisher.publish(make_weights(0))
    start_actor("bad", habit=habit, odd_from=odd_from)
    good = start_actor("good")
    if odd_from == 2:
        publisher.publish(make_weights(1))
    took_s = publish_while_silent(publisher, make_weights(odd_from), "bad-1")
    assert took_s < at_most(SILENCE_S + 2.0)
    assert good.loaded[-1] == odd_from
    assert publisher.drain_metrics()["weights/members"] == 1


def test_silent_actor_rejoins_after_it_answers(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    actor = start_actor("a")
    publisher.mark_silent(["a-1"])
    assert eventually(lambda: publisher.drain_metrics()["weights/members"] == 0)
    publisher.publish(make_weights(1))
    actor.join_again()
    assert not eventually(lambda: actor.loaded == [0, 1], within_s=0.3), "it is still silent"
    publisher.mark_silent([])
    actor.join_again()
    assert actor.wait_for(1) == 1.0


@pytest.fixture
def start_process(keys: RunKeys, publisher: Publisher, tmp_path: Path) -> Iterator[Launch]:
    """Yields a function that starts an actor in its own process; it returns once it has joined."""
    started: list[BaseProcess] = []

    def start(name: str, habit: str) -> BaseProcess:
        num_before = publisher.drain_metrics()["weights/members"]
        context = multiprocessing.get_context("spawn")
        arguments = (tmp_path / "keys", publisher.port, name, habit)
        started.append(context.Process(target=run_actor, args=arguments, daemon=True))
        started[-1].start()
        assert eventually(
            lambda: publisher.drain_metrics()["weights/members"] > num_before, within_s=60.0
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join(60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGKILL, "between_ready_and_broadcast", id="killed in a broadcast"),
        pytest.param(signal.SIGSTOP, "between_versions", id="stopped between versions"),
        pytest.param(signal.SIGKILL, "between_versions", id="killed", marks=pytest.mark.long),
        pytest.param(
            signal.SIGSTOP, "between_ready_and_broadcast", id="stopped", marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.timed
def test_killed_or_stopped_process_costs_a_few_heartbeats(
    publisher: Publisher, start_actor: Start, start_process: Launch, moment: str, number: int
) -> None:
    publisher.publish(make_weights(0))
    good = start_actor("good")
    habit = "stop" if moment == "between_ready_and_broadcast" else ""
    process = start_process("bad", habit)
    assert process.pid is not None
    if not habit:
        publisher.publish(make_weights(1))
        os.kill(process.pid, number)
    elif number == signal.SIGKILL:
        threading.Timer(0.5 * SILENCE_S, os.kill, [process.pid, number]).start()
    took_s = publish_while_silent(publisher, make_weights(2), "bad-1")
    assert took_s < at_most(SILENCE_S + 2.0)
    assert good.loaded[-1] == 2
    assert publisher.drain_metrics()["weights/members"] == 1
    took_s = publish_while_silent(publisher, make_weights(3), "bad-1")
    assert took_s < at_most(SILENCE_S), "the dead cost once"
    assert good.loaded[-1] == 3


def publish_while_silent(
    publisher: Publisher, weights: PublishedWeights, incarnation: str
) -> float:
    """Publish; the scheduler reports the silence later. Return the seconds it took."""
    word = threading.Timer(SILENCE_S, publisher.mark_silent, [[incarnation]])
    word.start()
    started = time.monotonic()
    publisher.publish(weights)
    took_s = time.monotonic() - started
    word.cancel()
    return took_s


def test_actor_with_different_bytes_is_removed(
    publisher: Publisher, start_actor: Start, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(make_weights(0))
    bad, good = start_actor("bad", habit="damage"), start_actor("good")
    publisher.publish(make_weights(1))
    assert good.wait_for(1) == 1.0
    assert bad.loaded == [0]
    # Its next heartbeat makes it a member again, until it fails again.
    assert "removed engine actor=bad reason=version 1 was not loaded: damaged" in caplog.text


@pytest.mark.parametrize(
    "scores", [[[-1.5, -2.0]], [[float("nan"), -2.0]], [[-1.0]], [], [[-1.0, -2.0], [-1.0]]]
)
def test_canaries_that_differ_raise_the_alarm(
    publisher: Publisher, start_actor: Start, scores: list[list[float]]
) -> None:
    publisher.publish(make_weights(0))
    start_actor("a", scores=scores)
    assert eventually(lambda: publisher.num_canary_alarms == 1)
    publisher.publish(make_weights(1))
    assert eventually(lambda: publisher.num_canary_alarms == 2)


def test_good_engine_resets_no_foreign_alarm(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    start_actor("bad", scores=[[-1.5, -2.0]])
    start_actor("good")
    for version in (1, 2):
        publisher.publish(make_weights(version))
    assert eventually(lambda: publisher.num_canary_alarms == 3)


def test_canaries_within_the_limit_are_no_alarm(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    start_actor("a", scores=[[-1.04, -2.04]])
    measured: list[float] = []
    assert eventually(
        lambda: bool(
            measured.append(publisher.drain_metrics().get("weights/canary_abs_logprob", 0.0))
            or max(measured)
        )
    )
    assert max(measured) == pytest.approx(0.04)
    assert publisher.num_canary_alarms == 0


def test_message_unrelated_to_weights_is_rejected(publisher: Publisher, keys: RunKeys) -> None:
    context = zmq.Context()
    address = f"tcp://{HOST}:{publisher.port}"
    dealer = connect_dealer(context, keys, address=address, timeout_s=60.0)
    dealer.send_multipart(encode(Rejected(reason="")))
    assert decode(dealer.recv_multipart()) == Rejected(
        reason="the weight plane does not accept a Rejected"
    )
    dealer.close(linger=0)
    context.term()
