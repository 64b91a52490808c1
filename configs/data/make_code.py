"""Writes the programming problems of `configs/data/code` in MBPP's format.

Run: python configs/data/make_code.py
"""

import json
from pathlib import Path

FOLDER = Path(__file__).with_name("code")
# Words of the task, the name, the parameters, the expression, and three calls.
PROBLEMS = [
    ("returns the sum of two numbers", "add", "a, b", "a + b", ["(2, 3)", "(-1, 1)", "(0, 7)"]),
    ("returns the difference of two numbers", "subtract", "a, b", "a - b", ["(5, 3)", "(1, 4)"]),
    ("returns the product of two numbers", "multiply", "a, b", "a * b", ["(2, 3)", "(0, 9)"]),
    ("returns the square of a number", "square", "n", "n * n", ["(3,)", "(-2,)", "(0,)"]),
    ("returns the larger of two numbers", "larger", "a, b", "max(a, b)", ["(1, 2)", "(5, -5)"]),
    ("returns the smaller of two numbers", "smaller", "a, b", "min(a, b)", ["(1, 2)", "(5, -5)"]),
    ("returns whether a number is even", "is_even", "n", "n % 2 == 0", ["(4,)", "(7,)"]),
    ("returns whether a number is odd", "is_odd", "n", "n % 2 == 1", ["(4,)", "(7,)"]),
    ("returns a text in reverse", "reverse", "text", "text[::-1]", ["('abc',)", "('',)"]),
    ("returns a text in capitals", "capitals", "text", "text.upper()", ["('abC',)", "('',)"]),
    ("returns the length of a text", "length", "text", "len(text)", ["('abc',)", "('',)"]),
    ("returns the words of a text", "words", "text", "text.split()", ["('a b  c',)", "('',)"]),
    ("returns the sum of a list", "total", "items", "sum(items)", ["([1, 2, 3],)", "([],)"]),
    ("returns the first item of a list", "first", "items", "items[0]", ["([7, 8],)", "(['a'],)"]),
    ("returns the last item of a list", "last", "items", "items[-1]", ["([7, 8],)", "(['a'],)"]),
    ("returns a sorted list", "ordered", "items", "sorted(items)", ["([3, 1, 2],)", "([],)"]),
    ("returns the largest item of a list", "largest", "items", "max(items)", ["([3, 9, 2],)"]),
    (
        "returns the number of vowels of a text",
        "vowels",
        "text",
        "sum(letter in 'aeiou' for letter in text.lower())",
        ["('Anna',)", "('xyz',)"],
    ),
    (
        "returns whether a text reads the same in reverse",
        "is_palindrome",
        "text",
        "text == text[::-1]",
        ["('anna',)", "('ab',)", "('',)"],
    ),
    (
        "returns the items of a list without repetitions, in their order",
        "unique",
        "items",
        "list(dict.fromkeys(items))",
        ["([1, 2, 1],)", "([],)"],
    ),
    (
        "returns the greatest common divisor of two positive numbers",
        "divisor",
        "a, b",
        "max(n for n in range(1, min(a, b) + 1) if a % n == 0 and b % n == 0)",
        ["(12, 18)", "(7, 5)"],
    ),
    (
        "returns the even numbers of a list",
        "evens",
        "items",
        "[n for n in items if n % 2 == 0]",
        ["([1, 2, 3, 4],)", "([],)"],
    ),
    (
        "returns the sum of the digits of a number that is not negative",
        "digit_sum",
        "n",
        "sum(int(digit) for digit in str(n))",
        ["(123,)", "(0,)"],
    ),
    (
        "returns the count of each letter of a text as a dict",
        "letters",
        "text",
        "{letter: text.count(letter) for letter in text}",
        ["('anna',)", "('',)"],
    ),
]
NUM_TEST = 6


def record(number: int, words: str, name: str, names: str, value: str, calls: list[str]) -> dict:
    """Return a problem as MBPP has it."""
    compute = eval(f"lambda {names}: {value}")
    tests = [f"assert {name}{call} == {compute(*eval(call))!r}" for call in calls]
    return {
        "task_id": number,
        "text": f"Write a function {name} that {words}.",
        "code": f"def {name}({names}):\n    return {value}",
        "test_list": [test.replace(",)", ")") for test in tests],
        "test_setup_code": "",
    }


def main() -> None:
    """Write both files. Every fourth problem is held out."""
    records = [record(n, *problem) for n, problem in enumerate(PROBLEMS, 1)]
    held = records[3::4][:NUM_TEST]
    for name, chosen in (("train", [r for r in records if r not in held]), ("test", held)):
        lines = "".join(json.dumps(each) + "\n" for each in chosen)
        (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
