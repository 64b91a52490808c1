"""Laws of reading an action and of grading an answer."""

import time

import pytest

from envhub.envs.searchqa.env import ActionTag, TaggedAction, exact_match, f1, tagged_action
from tests.bounds import at_most


@pytest.mark.parametrize(
    ("answer", "golden", "grade"),
    [
        ("The Beatles!", ["beatles"], 1.0),
        ("  an  APPLE. ", ["apple"], 1.0),
        ("1,203", ["1203"], 1.0),
        ("U.S.A.", ["Canada", "USA"], 1.0),
        ("theatre", ["atre"], 0.0),
        ("Beatles band", ["Beatles"], 0.0),
        ("", ["the"], 0.0),
        ("The", ["the"], 1.0),
        ("anything", [], 0.0),
    ],
)
def test_exact_match_compares_normalised_texts(
    answer: str, golden: list[str], grade: float
) -> None:
    assert exact_match(answer, golden) == grade


@pytest.mark.parametrize(
    ("answer", "golden", "grade"),
    [
        ("big red house", ["red house"], 0.8),  # precision 2/3, recall 1
        ("red", ["blue", "the red red house"], 0.5),  # precision 1, recall 1/3
        ("the red house", ["a red house"], 1.0),
        ("yes it is", ["yes"], 0.0),
        ("green", ["red"], 0.0),
        ("", ["red"], 0.0),
    ],
)
def test_f1_is_the_best_overlap_of_words(answer: str, golden: list[str], grade: float) -> None:
    assert f1(answer, golden) == pytest.approx(grade)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (
            "<think>hm</think> <search> red house </search>",
            TaggedAction(ActionTag.SEARCH, "red house"),
        ),
        ("<answer>a</answer> <search>b</search>", TaggedAction(ActionTag.ANSWER, "a")),
        ("<search>b</search><answer>a</answer>", TaggedAction(ActionTag.SEARCH, "b")),
        ("<answer>a</answer> no: <answer>\nb\n</answer>", TaggedAction(ActionTag.ANSWER, "b")),
        ("<search>b <answer>a</answer>", TaggedAction(ActionTag.ANSWER, "a")),
        (
            "<search><answer>a</answer></search>",
            TaggedAction(ActionTag.SEARCH, "<answer>a</answer>"),
        ),
        ("<answer>a<answer>b</answer>", TaggedAction(ActionTag.ANSWER, "a<answer>b")),
        ("<answer></answer>", TaggedAction(ActionTag.ANSWER, "")),
        ("</search><search>", None),
        ("<Search>a</Search>", None),
        ("", None),
    ],
)
def test_first_closed_tag_decides_the_action(text: str, action: TaggedAction | None) -> None:
    assert tagged_action(text) == action


def test_parse_takes_linear_time_for_unclosed_tags() -> None:
    start_s = time.thread_time()
    assert tagged_action("<search>" * 200_000 + "<answer>" * 200_000) is None
    assert time.thread_time() - start_s < at_most(0.5)
