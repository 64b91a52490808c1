"""Laws of looking after engines while no version is published."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.config.run import OnStall, RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, LongstrideError
from learner.weights import canary as prompting
from learner.weights import publisher as watching
from learner.weights.canary import LATEST_TOKENS, MAX_TOKENS, Canary, RecentPrompts, prompts_of
from learner.weights.publisher import EngineWatch, Publisher
from tests.learner.builders import make_trajectory
from tests.learner.weights.test_publisher import (
    Start,
    eventually,
    keys,
    make_weights,
    publisher,
    start_actor,
    timeout_s,
)
from tests.learner.weights.toy_actor import CANARY_LOGPROBS

__all__ = ["keys", "publisher", "start_actor", "timeout_s"]  # fixtures
OURS = [-1.0, -2.0]


def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    return [OURS for _ in sequences]


@pytest.fixture
def recent() -> RecentPrompts:
    return RecentPrompts()


@pytest.fixture
def watch(
    publisher: Publisher, recent: RecentPrompts, monkeypatch: pytest.MonkeyPatch
) -> EngineWatch:
    monkeypatch.setattr(watching, "CHECK_EVERY_S", 0.1)
    return EngineWatch(publisher, recent, score, RunConfig())


def look_on(watch: EngineWatch, recent: RecentPrompts, actors: Sequence[str], *, for_s: float):
    """Check for a while, like a wait for a batch, while no group has signal."""
    never = threading.Event()
    for _ in range(int(for_s / 0.02)):
        for actor in actors:
            recent.add(make_trajectory([1, 2, 3], [0, 1, 1], actor=actor))
        watch.check_if_due(0)
        never.wait(0.02)


def test_wrong_engine_scores_raise_without_publishing(
    publisher: Publisher, start_actor: Start, watch: EngineWatch, recent: RecentPrompts
) -> None:
    weights = make_weights(0)
    publisher.publish(weights)
    start_actor("good", scores=CANARY_LOGPROBS)
    start_actor("nonsense", scores=[[-3.0, -4.0]] * 4)
    # A restart cannot mend it: the launcher does not start a role again after a ConfigError.
    with pytest.raises(ConfigError, match=r"engine nonsense .* differed \d times") as caught:
        look_on(watch, recent, ["nonsense"], for_s=60.0)
    for key in (
        "learner.max_canary_alarms=3",
        "learner.precision=fp32",
        "learner.max_canary_delta",
    ):
        assert key in str(caught.value)


def test_good_engines_are_checked_and_raise_no_alarm(
    publisher: Publisher, start_actor: Start, watch: EngineWatch, recent: RecentPrompts
) -> None:
    publisher.publish(make_weights(0))
    start_actor("good", scores=[OURS])
    recent.add(make_trajectory([1, 2, 3], [0, 1, 1], actor="good"))
    recent.add(make_trajectory([1, 2, 3], [0, 1, 1], actor="gone"))
    assert eventually(lambda: publisher.drain_metrics().get("weights/canary_abs_logprob") == 0.0)
    threading.Event().wait(0.1)
    watch.check_if_due(0)
    assert eventually(lambda: publisher.drain_metrics().get("weights/canary_abs_logprob") == 0.0)
    assert publisher.num_canary_alarms == 0


def test_outdated_canary_answer_is_ignored() -> None:
    from common.weights.messages import CanaryScores

    canary = Canary(max_delta=0.05)
    prompts = prompts_of([make_trajectory([1, 2, 3], [0, 1, 1])])
    first = canary.expect_check("a", 0, prompts, [OURS])
    second = canary.expect_check("a", 1, prompts, [OURS])
    wrong = [[-9.0, -9.0]]
    for number, version, actor in ((first, 0, "a"), (second, 0, "a"), (second + 1, 1, "a")):
        answer = CanaryScores(actor=actor, version=version, logprobs=wrong, number=number)
        canary.compare(answer)
    assert canary.num_alarms == 0


@pytest.mark.parametrize("num_prompt", [1, 50, 95, 96, 500, LATEST_TOKENS])
def test_prompt_of_any_length_keeps_samples(num_prompt: int) -> None:
    length = num_prompt + 200
    mask = [0] * num_prompt + [1] * 200
    episode = make_trajectory(list(range(length)), mask)
    found = prompts_of([episode])
    assert sum(found.masks[0]) >= min(32, MAX_TOKENS - num_prompt)
    assert len(found.masks[0]) == len(found.token_ids[0]) - 1
    assert any(found.masks[0])
    assert prompts_of([make_trajectory([1, 2], [0, 0])]).token_ids == []


def test_learner_without_receivers_warns_or_stops(
    publisher: Publisher,
    start_actor: Start,
    recent: RecentPrompts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = RunSection(stall_s=5.0)
    acting = EngineWatch(publisher, recent, score, RunConfig(run=run))
    warning = EngineWatch(
        publisher, recent, score, RunConfig(run=replace(run, on_stall=OnStall.WARN))
    )
    members = publisher._members
    assert acting.missing_engines(8) == ""
    members._last_seen -= 6.0
    assert acting.missing_engines(0) == "actors: an engine that loads weights", "there is nobody"
    assert caplog.records[-1].getMessage().endswith("and no actor has a started engine.")
    assert caplog.records[-1].levelname == "WARNING"
    assert warning.missing_engines(8) == "actors: an engine that loads weights"
    with pytest.raises(
        LongstrideError, match="No engine has loaded weights for 6 s, although actors have"
    ):
        acting.missing_engines(8)
    publisher.publish(make_weights(0))
    start_actor("a")
    assert acting.missing_engines(8) == ""


def test_usual_difference_is_measured_before_the_first_check_is_due(
    publisher: Publisher, start_actor: Start, recent: RecentPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompting, "EVERY_S", 0.0)
    watch = EngineWatch(publisher, recent, score, RunConfig())
    publisher.publish(replace(make_weights(0), canary_token_ids=[], canary_logprobs=[]))
    start_actor("good", scores=[OURS] * 4)
    for number in range(1, 5):
        recent.add(make_trajectory([1, 2, 3], [0, 1, 1], actor="good"))
        watch.check_if_due(0)
        assert watch._is_measured is (number == 4)
    assert eventually(lambda: publisher.drain_metrics().get("weights/canary_abs_logprob") == 0.0)
