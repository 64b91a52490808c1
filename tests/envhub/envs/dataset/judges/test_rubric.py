"""Laws of the score that is read from an answer of a judge."""

import time
from typing import Any

import pytest

from envhub.envs.dataset.judges.options import JudgeOptions
from envhub.envs.dataset.judges.rubric import Rubric, Unparsed


def read(text: str, *, least: float = 0, most: float = 10, **keys: Any) -> float | None:
    """Return the score that a judge with these options means; None: it has none."""
    rubric = Rubric(JudgeOptions(name="j", url="http://x/v1", min=least, max=most, **keys))
    try:
        share = rubric.score(text)
    except Unparsed:
        return None
    return round(share * (most - least) + least, 9)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Harmful. Score: -1", -1),
        ("score = -0.5", -0.5),
        ("Score: **-1**", -1),
        ("Score: \u22121", -1),
        ("Score: \u20131", -1),
        ("Score: +1", 1),
        ("Score \u2013 1", 1),
    ],
)
def test_judge_reads_the_sign_of_a_score(text: str, score: float) -> None:
    assert read(text, least=-1, most=1) == score


@pytest.mark.parametrize(
    "text",
    [
        "Score: 8",
        "**Score**: **8**",
        "**Score (0-10):** [[8]]",
        "Score: 8/10",
        "Score: **8** / 10.",
        "Score: 8 (out of 10)",
        "Score: 8 points out of 10",
        "### Score\n\n8",
        "final_score=8.0",
        "The score is 8. A score of 10 needs a proof.",
        r"Score: $\boxed{8}$",
        "Score: 3, or rather\nScore: 8\n- 9 would be too much",
        "<think>Score: 1</think>Score: 8",
        "Score: 1</think>Score: 8",
        "<score>8</score>",
        "<final_score>\n8\n</final_score>",
        "| Score | 8 |",
        "Score\uff1a8",
        "Score is: 8",
        "Score -> 8",
        "Score \u2192 8",
        "Score [0-10]: 8",
        "Score out of 10: 8",
        "Score:__8__",
        "Score: 8\nIt passes, as its score > 5.",
        "Score: 8\nUnderscore: 3",
        "Score: 8\n| Part | Score |\n|---|---|",
    ],
)
def test_judge_reads_a_score_in_its_decoration(text: str) -> None:
    assert read(text) == 8


def test_judge_reads_commas_by_the_digits_after_them() -> None:
    assert read("Score: 8,5") == 8.5
    assert read("Score: 1,000.5", most=2000) == 1000.5
    assert read("Score: 80%", most=100) == 80


@pytest.mark.parametrize(
    "text",
    [
        "Score: 4/5",
        "Score: 7-8",
        "Score: 7 to 8",
        "Score: 8, 9",
        "Score: 8.5.1",
        "Score: 7 1/2",
        "Underscore: 3",
        "Score: 80%",
        "Score: 11",
        "Score: N/A",
        "Score: 3\nScore: N/A",
        "Score: - 8",
        "<think>Score: 8",
        "Score: " + "9" * 5000,
    ],
)
def test_unclear_score_is_no_score(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('The set {a, b} is right.\n{"score": 8}', 8),
        ('<think>{"score": 1}?</think>{"score": 8}', 8),
        ('```json\n{"score": 8}\n```', 8),
        ('{"parts": {"score": 3}, "score": "8/10"}', 8),
        ('{"score": 8, "reason": "{a} \\"}\\""} {x}', 8),
        ('use { here: {"score": 8}', 8),
        ('{"reason": "two\nlines", "score": 8}', 8),
        ('{"parts": {"score": 3}, "score": 8,}', None),
        ('{"parts": {"score": 3}, "score": 8', None),
        ('{"result": {"score": 8}}', None),
        ('{"score": ' + "9" * 5000 + "}", None),
    ],
)
def test_json_of_a_judge_is_found_in_its_answer(text: str, score: float | None) -> None:
    assert read(text, json="score") == score


def test_own_pattern_may_match_more_than_the_number() -> None:
    assert read("Rating: **8/10**", pattern=r"Rating:\s*(.*)") == 8
    assert read("Rating: 8-9", pattern=r"Rating:\s*(.*)") is None


@pytest.mark.parametrize("part", ["score ", "score (", "{", '{"a":', "<think>", "Score: 1 "])
def test_long_answer_of_a_judge_is_read_in_linear_time(part: str) -> None:
    began_s = time.process_time()
    read(part * (100_000 // len(part)))
    read(part * (100_000 // len(part)), json="score")
    assert time.process_time() - began_s < 2.0
