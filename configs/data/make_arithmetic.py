"""Writes the arithmetic word problems: `python configs/data/make_arithmetic.py`.

All problems have one step with numbers up to 6. The seed is fixed, so each run writes the same
files. No problem of the evaluation file is in the training file.
"""

import json
import random
from pathlib import Path

SEED = 7
NUM_TRAIN = 600
NUM_EVAL = 200
MOST = 6
NAMES = ("Ana", "Ben", "Chi", "Dov", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jun")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stones", "tickets")
SUMS = (
    "{name} has {a} {things} and finds {b} more. How many {things} does {name} have?",
    "{name} buys {a} {things} today and {b} tomorrow. How many {things} are that?",
    "There are {a} {things} on the table. {name} adds {b}. How many {things} are there?",
)
DIFFERENCES = (
    "{name} has {a} {things} and loses {b}. How many {things} are left?",
    "{name} had {a} {things} and gave {b} away. How many {things} does {name} keep?",
    "Of {a} {things}, {b} are broken. How many {things} are whole?",
)


def make_problem(rng: random.Random) -> dict[str, str]:
    """Return a random problem with its answer in the form of GSM8K."""
    a = rng.randint(1, MOST)
    b = rng.randint(1, MOST)
    is_sum = rng.random() < 0.5
    if not is_sum:
        a, b = max(a, b), min(a, b)
    text = rng.choice(SUMS if is_sum else DIFFERENCES)
    question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    result = a + b if is_sum else a - b
    sign = "+" if is_sum else "-"
    return {"question": question, "answer": f"{a} {sign} {b} = {result} #### {result}"}


def make_problems(num: int, rng: random.Random) -> list[dict[str, str]]:
    """Return problems with different questions."""
    found: dict[str, dict[str, str]] = {}
    while len(found) < num:
        problem = make_problem(rng)
        found[problem["question"]] = problem
    return list(found.values())


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    problems = make_problems(NUM_TRAIN + NUM_EVAL, random.Random(SEED))
    parts = {"train": problems[:NUM_TRAIN], "test": problems[NUM_TRAIN:]}
    for name, part in parts.items():
        text = "".join(json.dumps(each) + "\n" for each in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent / "arithmetic")
