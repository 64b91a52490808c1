"""Writes the programming problems of `configs/data/code` in MBPP's format.

Each problem is a family with a number k, such as "returns n plus k". No pair of family and number
of the evaluation file is in the training file, so no solution is in both. The seed is fixed.

Run: python configs/data/make_code.py
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("code")
SEED = 7
NUM_TEST = 100
NUMBERS = range(2, 21)  # k of the families below.
SIZES = range(2, 8)  # k of the families that cut or repeat.
# Words of the task, the name, the parameter, and the expression.
ON_NUMBERS = [
    ("n plus {k}", "plus", "n", "n + {k}"),
    ("n minus {k}", "minus", "n", "n - {k}"),
    ("n times {k}", "times", "n", "n * {k}"),
    ("the remainder of n divided by {k}", "remainder", "n", "n % {k}"),
    ("n divided by {k}, rounded down", "divided", "n", "n // {k}"),
    ("the larger one of n and {k}", "larger", "n", "max(n, {k})"),
    ("the smaller one of n and {k}", "smaller", "n", "min(n, {k})"),
    ("whether {k} divides n", "divides", "n", "n % {k} == 0"),
    ("whether n is above {k}", "is_above", "n", "n > {k}"),
    ("whether n is below {k}", "is_below", "n", "n < {k}"),
]
ON_LISTS = [
    ("each item times {k}", "scaled", "items", "[n * {k} for n in items]"),
    ("each item plus {k}", "moved", "items", "[n + {k} for n in items]"),
    ("the items above {k}", "above", "items", "[n for n in items if n > {k}]"),
    ("the items below {k}", "below", "items", "[n for n in items if n < {k}]"),
    ("the sum of the items, plus {k}", "total", "items", "sum(items) + {k}"),
    ("how many items are {k}", "count", "items", "items.count({k})"),
    ("whether an item is {k}", "has", "items", "{k} in items"),
]
ON_TEXTS = [
    ("the first {k} letters of text", "head", "text", "text[:{k}]"),
    ("the last {k} letters of text", "tail", "text", "text[-{k}:]"),
    ("text without its first {k} letters", "rest", "text", "text[{k}:]"),
    ("text without its last {k} letters", "start", "text", "text[:-{k}]"),
    ("the letters of text whose index is a multiple of {k}", "every", "text", "text[::{k}]"),
    ("text {k} times", "repeat", "text", "text * {k}"),
    ("whether text has {k} letters", "has_length", "text", "len(text) == {k}"),
]


def problems() -> Iterator[tuple[tuple[str, str, str, str], int, list[Any]]]:
    """Yield all families with all numbers, and the arguments of three calls.

    The calls are near the number, so a program with another number fails one of them.
    """
    for k in NUMBERS:
        for family in ON_NUMBERS:
            yield family, k, [k, k - 1, k + 1]
        for family in ON_LISTS:
            yield family, k, [[k, k - 1], [k + 1, k, k], [0]]
    for k in SIZES:
        for family in ON_TEXTS:
            yield family, k, ["learning"[: k + 1], "python"[:k], "reinforcement"]


def record(number: int, family: tuple[str, str, str, str], k: int, calls: list[Any]) -> dict:
    """Return a problem as MBPP has it."""
    words, name, parameter, form = family
    value = form.format(k=k)
    compute = eval(f"lambda {parameter}: {value}")
    return {
        "task_id": number,
        "text": f"Write a function {name} of {parameter} that returns {words.format(k=k)}.",
        "code": f"def {name}({parameter}):\n    return {value}",
        "test_list": [f"assert {name}({call!r}) == {compute(call)!r}" for call in calls],
        "test_setup_code": "",
    }


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    records = [record(number, *problem) for number, problem in enumerate(problems(), 1)]
    random.Random(SEED).shuffle(records)
    parts = {"test": records[:NUM_TEST], "train": records[NUM_TEST:]}
    for name, part in parts.items():
        text = "".join(json.dumps(each) + "\n" for each in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
