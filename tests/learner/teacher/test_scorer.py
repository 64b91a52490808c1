"""Laws of the component that scores groups with the teacher, over real sockets."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.config.algorithm import TeacherForm, TeacherSection
from common.errors import ConfigError
from common.http.model_endpoint import Refused
from learner.teacher.scorer import TeacherEndpoint, TeacherScorer, VocabularyCheck
from tests.learner.builders import make_trajectory
from tests.learner.teacher.served import KEY, TOKENIZER, Teacher

NAME = "algorithm.teacher.url=http://t/v1"


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    served = Teacher()
    yield served
    served.end()
    served.close()


def scorer_of(teacher: Teacher, tokenizer: Any = TOKENIZER, **changes: Any) -> TeacherScorer:
    cfg = TeacherSection(url="http://t/v1", model="m", timeout_s=30.0, **changes)
    endpoint = TeacherEndpoint(
        find_url=lambda: teacher.url, key=KEY, model="m", timeout_s=cfg.timeout_s, is_own=True
    )
    vocabulary = VocabularyCheck(tokenizer=tokenizer, context=511, name=NAME)
    scorer = TeacherScorer(endpoint, vocabulary, cfg, probe_s=0.02)
    scorer.start()
    return scorer


@pytest.fixture
def scorer(teacher: Teacher) -> Iterator[TeacherScorer]:
    made = scorer_of(teacher)
    yield made
    made.stop()
    assert not made.is_alive()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sampled_tokens_get_the_scores_of_their_positions(
    teacher: Teacher, scorer: TeacherScorer
) -> None:
    trajectory = make_trajectory([5, 16, 7, 24, 3], [0, 1, 0, 1, 0])
    (found,) = scorer.score([trajectory], check=lambda: None)
    assert found.logprobs is not None
    assert found.logprobs.tolist() == [-2.0, -3.0]
    assert teacher.engine.asked == [[5, 16, 7, 24]]  # Without tokens after the last sampled one.
    metrics = scorer.drain_metrics()
    assert (metrics["teacher/tokens"], metrics["teacher/waiting"]) == (4.0, 0.0)
    assert metrics["teacher/latency"] > 0.0
    assert scorer.drain_metrics()["teacher/tokens"] == 0.0


def test_topk_scores_are_the_tokens_of_the_lowest_ranks(teacher: Teacher) -> None:
    scorer = scorer_of(teacher, form=TeacherForm.TOPK, k=2)
    trajectory = make_trajectory([5, 16, 1], [0, 1, 1])
    (found,) = scorer.score([trajectory], check=lambda: None)
    scorer.stop()
    assert found.ids is not None
    assert found.top is not None
    assert found.ids.tolist() == [[0, 1], [0, 1]]  # Token 16 has rank 99.
    assert found.top.tolist() == [[-1.0, -2.0], [-1.0, -2.0]]


def test_each_segment_is_scored_by_itself(teacher: Teacher, scorer: TeacherScorer) -> None:
    whole = make_trajectory([5, 16, 6, 24], [0, 1, 0, 1])
    cut = replace(whole, segment_starts=np.array([0, 2], dtype=np.int32))
    (found,) = scorer.score([cut], check=lambda: None)
    assert found.logprobs is not None
    assert found.logprobs.tolist() == [-2.0, -3.0]
    assert sorted(teacher.engine.asked) == [[5, 16], [6, 24]]


def test_episode_without_sampled_tokens_needs_no_request(
    teacher: Teacher, scorer: TeacherScorer
) -> None:
    (found,) = scorer.score([make_trajectory([5, 6], [0, 0], logprobs=[])], check=lambda: None)
    assert found.logprobs is not None
    assert found.logprobs.size == 0
    assert teacher.engine.asked == []


def test_requests_at_once_are_bounded(teacher: Teacher) -> None:
    scorer = scorer_of(teacher, concurrency=2)
    teacher.set_answering(False)
    pending = scorer.begin([make_trajectory([5, each], [0, 1]) for each in range(8, 16)])
    wait_until(lambda: teacher.engine.num_at_once == 2)
    assert scorer.num_waiting == 8
    teacher.set_answering(True)
    assert len(pending.result(60.0)) == 8
    scorer.stop()
    assert teacher.engine.most_at_once == 2


def test_room_ends_at_the_bound_of_waiting_trajectories(teacher: Teacher) -> None:
    scorer = scorer_of(teacher, max_waiting=2)
    teacher.set_answering(False)
    first = scorer.begin([make_trajectory([5, 8], [0, 1])])
    assert scorer.has_room
    second = scorer.begin([make_trajectory([5, 9], [0, 1])])
    assert not scorer.has_room
    teacher.set_answering(True)
    first.result(60.0)
    second.result(60.0)
    assert scorer.has_room
    scorer.stop()


def test_teacher_that_is_down_delays_scores_only(teacher: Teacher, scorer: TeacherScorer) -> None:
    scorer.score([make_trajectory([5, 16], [0, 1])], check=lambda: None)
    teacher.end()
    pending = scorer.begin([make_trajectory([5, 24], [0, 1])])
    wait_until(lambda: "is down: Client" in scorer.waiting_for)
    assert scorer.waiting_for.startswith(f"teacher: {NAME} is down: ")
    assert not pending.done()
    teacher.listen()
    (found,) = pending.result(60.0)
    assert found.logprobs is not None
    assert found.logprobs.tolist() == [-3.0]
    assert scorer.waiting_for == ""
    assert scorer.drain_metrics()["teacher/down_s"] > 0.0


def test_failing_engine_counts_as_a_teacher_that_is_down(
    teacher: Teacher, scorer: TeacherScorer
) -> None:
    teacher.engine.problem = "engine died"
    pending = scorer.begin([make_trajectory([5, 16], [0, 1])])
    wait_until(lambda: "engine died" in scorer.problem)
    assert not pending.done()
    teacher.engine.problem = ""
    (found,) = pending.result(60.0)
    assert found.logprobs is not None
    assert found.logprobs.tolist() == [-2.0]


def test_refused_request_ends_the_run_with_its_reason(
    teacher: Teacher, scorer: TeacherScorer
) -> None:
    beyond = make_trajectory([5, 448], [0, 1])
    with pytest.raises(Refused, match="token id 448 is outside of the vocabulary of 448"):
        scorer.score([beyond], check=lambda: None)
    with pytest.raises(Refused, match=r"algorithm\.teacher\.url=http://t/v1: "):
        scorer.check()


def test_wrong_key_is_named_without_the_key(teacher: Teacher) -> None:
    cfg = TeacherSection(url="http://t/v1", model="m")
    endpoint = TeacherEndpoint(
        find_url=lambda: teacher.url, key="wrong-key", model="m", timeout_s=30.0, is_own=True
    )
    vocabulary = VocabularyCheck(tokenizer=TOKENIZER, context=511, name=NAME)
    scorer = TeacherScorer(endpoint, vocabulary, cfg)
    scorer.start()
    with pytest.raises(Refused, match=r"HTTP 401 .*algorithm\.teacher\.key_env") as error:
        scorer.score([make_trajectory([5, 6], [0, 1])], check=lambda: None)
    assert "wrong-key" not in str(error.value)
    scorer.stop()


class OtherTokenizer:
    """A tokenizer with further tokens, and with other ids if they are `shifted`."""

    def __init__(self, *, more: int = 0, shifted: bool = False) -> None:
        self._more = more
        self._shift = int(shifted)

    def __len__(self) -> int:
        return len(TOKENIZER) + self._more

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = TOKENIZER.encode(text, add_special_tokens=add_special_tokens)
        return [each + self._shift for each in ids]


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (OtherTokenizer(shifted=True), "vocabulary has {own} tokens, the policy's {own}"),
        (OtherTokenizer(more=5), "vocabulary has {own} tokens, and the policy's has {more}"),
    ],
)
def test_other_vocabulary_is_refused_with_both_sizes(
    teacher: Teacher, tokenizer: OtherTokenizer, reason: str
) -> None:
    scorer = scorer_of(teacher, tokenizer)
    size = len(TOKENIZER)
    with pytest.raises(ConfigError, match=reason.format(own=size, more=size + 5)):
        scorer.score([make_trajectory([5, 6], [0, 1])], check=lambda: None)
    scorer.stop()


def test_short_context_is_refused_with_both_lengths(teacher: Teacher) -> None:
    scorer = scorer_of(teacher)
    scorer.stop()
    endpoint = scorer._endpoint
    check = VocabularyCheck(tokenizer=TOKENIZER, context=512, name=NAME)
    with pytest.raises(ConfigError, match=r"context has 512 tokens.*needs one more, 513"):
        teacher.call(check.run(endpoint))


def test_size_of_a_silent_vocabulary_is_found_by_its_texts(teacher: Teacher) -> None:
    """vLLM's server reports no size: the text of tokens beyond the end is empty."""
    scorer = scorer_of(teacher)
    scorer.stop()
    size = len(TOKENIZER)
    for own in (size, size + 5):
        check = VocabularyCheck(tokenizer=OtherTokenizer(more=own - size), context=511, name=NAME)
        assert teacher.call(check._size(scorer._endpoint, {})) == size


def test_stopped_scorer_leaves_waiting_trajectories(teacher: Teacher) -> None:
    scorer = scorer_of(teacher)
    teacher.set_answering(False)
    pending = scorer.begin([make_trajectory([5, 16], [0, 1])])
    wait_until(lambda: teacher.engine.num_at_once == 1)
    scorer.stop()
    assert not scorer.is_alive()
    assert pending.cancelled()
    teacher.set_answering(True)
