"""Rewards that ship with the dataset environment, by the names that `reward` accepts."""

import importlib
import re
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec

from common.errors import ConfigError

FINAL = "####"  # The mark of GSM8K before the final answer.
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
MATH_VERIFY = "reward=math needs math-verify. Install it with: pip install math-verify"


def final_answer(text: str) -> str:
    """Return the text after the last `####`, else in the last `\\boxed{}`, else the whole text."""
    if FINAL in text:
        return text.rpartition(FINAL)[2].strip()
    boxed = BOXED.findall(text)
    return str(boxed[-1]).strip() if boxed else text.strip()


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None if it has none.

    Example: "so 1,250.50 in all" is 1250.5.
    """
    found = NUMBER.findall(text)
    if not found:
        return None
    whole, _, below = found[-1].replace(",", "").replace(" ", "").partition("/")
    return Fraction(whole) / int(below) if below and int(below) else Fraction(whole)


def exact_number(completion: str, ground_truth: str) -> float:
    """Return 1 if the answer's last number equals that of the reference, else 0.

    Raises: ValueError: the reference answer holds no number.
    """
    wanted = last_number(final_answer(str(ground_truth)))
    if wanted is None:
        raise ValueError(f"the reference answer {ground_truth!r:.100} holds no number")
    return float(last_number(final_answer(completion)) == wanted)


def exact_text(completion: str, ground_truth: str) -> float:
    """Return 1 if the final answer equals the reference, apart from case and spaces, else 0."""
    given, wanted = (
        " ".join(final_answer(str(each)).casefold().split()) for each in (completion, ground_truth)
    )
    return float(given == wanted)


def math(completion: str, ground_truth: str) -> float:
    """Return 1 if math-verify finds the answer equal to the reference, else 0.

    Raises: ValueError: math-verify cannot read the reference answer.
    """
    library = importlib.import_module("math_verify")
    # Its own time limits use signals, which only the main thread receives.
    gold = library.parse(f"${final_answer(str(ground_truth))}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the reference answer {ground_truth!r:.100}")
    given = library.parse(final_answer(completion), parsing_timeout=None)
    return float(library.verify(gold, given, timeout_seconds=None))


def built_in(name: str) -> Callable[..., float] | None:
    """Return a reward by its name; None: there is none.

    Raises: ConfigError: a package is missing.
    """
    if name == "math" and find_spec("math_verify") is None:
        raise ConfigError(MATH_VERIFY)
    return GRADERS.get(name)


GRADERS: dict[str, Callable[..., float]] = {
    "exact_number": exact_number,
    "exact_text": exact_text,
    "math": math,
}
