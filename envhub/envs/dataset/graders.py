"""Rewards that ship with the dataset environment, by the names that `reward` accepts.

Grader processes load this file by its path, so it imports no module of the product.
"""

import importlib
import json
import logging
import random
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FINAL = "####"  # The mark of GSM8K before the final answer.
BRACE = re.compile(r"\\boxed\s{0,9}\{|\\.|[{}]", re.DOTALL)
# LaTeX's \text{}, \mathbf{} and the like, unless digits inside and outside would join.
_FONT = r"\\(?:math|text)[a-z]{0,10}\s?\{"
FONT = re.compile(rf"(?:(?<!\d){_FONT}|{_FONT}(?!\d))([^{{}}]*)\}}(?!(?<=\d\}})\d)")
LATEX_FRACTION = re.compile(
    r"\\(?:[dtcs]?|nice)frac\s?(?:\{([^{}]{1,200})\}|(\d))\s?(?:\{([^{}]{1,200})\}|(\d))"
)
LATEX_SPACE = re.compile(r"\\[,;: ]|~")
# Characters between the digits of one number: LaTeX's spaces, narrow spaces and apostrophes.
GROUPED = re.compile(r"(?<=\d)(?:\\[,; ]|\{,\}|[\u00a0\u2007\u2009\u202f'\u2019_])(?=\d{3})")
# Groups of thousands with a space: "10 000".
SPACED = re.compile(r"(?<![\w.,/^])([1-9]\d{0,2}(?: \d{3})+)(?![\w/^])")
# Currencies before an amount: "€5", "Rs.1,250", "-US$5".
CURRENCY = re.compile(
    r"(?:[€£¥₹₩₽₺₴₪₫฿]|(?<![^\W_])(?:Rs\.?|INR|USD|EUR|GBP|(?:US|CA?|AU?|HK|NZ)\$))\s?(?=[-+\d.])"
)
# The exponent of a unit: "25 cm2", "25 m<sup>2</sup>".
UNIT = re.compile(r"(\d\s?(?:[dckm]?m|ft|in|yd|mi))(?=[23]\b)")
RAISED = re.compile(r"<sup>([^<>]{1,20})</sup>")
# A sign may follow these texts. Behind "%" or "5$" it joins two ends of a range.
OPENED = r"[=≈~<>(\[{:,|][ \t]{0,3}|(?<!\d)\$"
UNJOINED = r"(?<![\w)\]}.%°])(?<!\d\$)"
# Signs apart from their number: "x = - 5" and "\boxed{-\,5}", a whole text such as "- 5", "-(1/2)".
# Elsewhere a sign with a space is a dash, an operator or the mark of a list.
GAP = r"[^\S\n]{1,3}(?=\\?\$?\s?[\d.])"
APART = re.compile(rf"((?:{OPENED})[-+]){GAP}")
ALONE = re.compile(rf"\A([\s*$]*[-+]){GAP}(?=(?:\d|[^\w\n])*\s*\Z)")
# Marks of text around a number behind its sign: "-**5**", "-`5`", "-{5}", "-<b>5</b>".
MARKED = re.compile(
    rf"((?:{OPENED})[-+][ \t]{{0,3}}|{UNJOINED}[-+])"
    r"(?:(\*{1,3}|_{1,2}|`)|(\{)|<(\w{1,10})>)"
    r"(\\?\$?\s?[\d.][^*_`{}<\n]*)(?(2)\2|(?(3)\}|</\4>))"
)
# A sign before the box or the formula of its number: "-\boxed{5}", "-$5$".
OUTSIDE = re.compile(
    rf"((?:{OPENED})|(?<![\w)\]}}.%°$]))([-\u2212])(\\boxed\s?\{{|\$)(?=[^-+\u2212$\n]{{1,200}}[}}$])"
)
# "negative 5", and "minus 5" that subtracts nothing.
NEGATIVE = re.compile(
    r"(?:(?<![\w-])negative|((?:\A|[=:(*]|\b(?:is|are|was|were|be|get|gets|equals|to|of|at))"
    r"\s{0,3})minus)\s{1,3}(?=(?:\*{1,3}|_{1,2}|`)?\$?[\d.])",
    re.IGNORECASE,
)
BRACKETED = re.compile(rf"{UNJOINED}([-+])(?:\\left)?\(\s?([\d.,/ ]{{1,200}})(?:\\right)?\)")
NUMBER = re.compile(
    rf"(?P<sign>{UNJOINED}[-+](?:\\?\$\s?)?|)"
    r"(?P<digits>\d[\d.,]*|\.\d+)"
    r"(?:[eE](?P<power>[-+]?\d+)(?!\w)|"
    r"\s{0,3}(?:[xX\u00d7*\u00b7\u22c5]|\\times|\\cdot)\s{0,3}\{?10\}?\s?(?:\^|\*\*)\s?"
    r"[{(]?\s?(?P<ten>[-+]?\d+)\s?[)}]?|"
    r"\s?(?:\^|\*\*)\s?(?:[{(]\s?(?P<inside>[-+]?\d[\d./]*)\s?[)}]|(?P<raised>[-+]?\d+(?:\.\d+)?))|"
    r"\s{1,3}(?P<part>\d+)\s?/\s?(?P<whole>\d+)(?![\d.,/]*\d)|)"
    r"(?:\s{0,3}/\s{0,3}(?P<below>[-+]?(?:\d[\d.,]*|\.\d+)))?"
    r"(?P<percent>[\s$]{0,3}\\?%|\s?per\s?cent\b)?"
)
# The text before a number that is an exponent. Two stars after a space begin bold text.
EXPONENT = re.compile(r"(?:\^\s?|(?<=[\w)\]}])\*\*\s?|\s\*\*\s)[{(]?[-+]?$")
# The number is a radicand, or a factor of a root or of pi: the term is no number to compare.
ROOT = re.compile(r"(?:\\sqrt(?:\[\d\])?\s?\{?|√\s?[({]?)\s?$")
FACTOR = re.compile(r"\s?(?:\*|\\cdot|\\times)?\s?(?:\\sqrt|√|\\?pi\b|π)")
# The number divides a term that is no number: "(a + 1)/2", "\frac{\sqrt{3}}{2}".
DIVISOR = re.compile(r"(?:[)\]}]\s?/\s?[({]?|\}\s?\{)\s?$")
# Brackets around a whole number of a fraction: "(-1)/2", "{1}/{2}".
WHOLE = re.compile(
    r"\{([-+]?\d{1,20})\}(?=\s?/)|(?<![\w)])\(([-+]?\d{1,20})\)(?=\s?/)|(?<=/)[{(](\d{1,20})[})]"
)
# Bold text, which is no power: "is**7**", but not "2**3**".
BOLD = re.compile(r"(?<![\d)\]}*])\*\*(?=\S)([^*\n]*)(?<=\S)\*\*(?![\w*(])")
# Words, and marks of formulas and of Markdown: a text with them is no single formula.
PROSE = re.compile(r"[^\W\d_]{2}|[$`\n]|\*\*|\\[(\[]")
COMMAND = re.compile(r"\\[a-zA-Z]+")
MIXED = re.compile(r"(?<![\w.,/}])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w.,/])")
RADICAL = re.compile(r"√\s?(?:\(([^()]{1,200})\)|(\w{1,200}))")
ROUNDING_ERROR = 1e-9  # A verifier's sum of shares may exceed 1 by less than this.
MAX_DIGITS = 100_000  # Digits, or zeros of an exponent, of a number that is compared.
CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("\u066a\uff05", "%"),
        **dict.fromkeys("\u2217\uff0a", "*"),
        **dict.fromkeys("\u200b\u200e\u200f\u2060\ufeff", ""),  # They have no width.
        **{"\u066b": ".", "\uff0e": ".", "\u066c": ",", "\uff0c": ",", "\uff0b": "+"},
    }
)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
OTHER_DIGIT = re.compile(r"[^\W0-9_]|[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]")


def final_answer(text: str) -> str:
    """Return the text after the last `####`, else in the last `\\boxed{}` or <answer> tags.

    A text without these marks is returned as it is.
    """
    tail = text.rstrip().removesuffix(FINAL).rpartition(FINAL)[2]
    boxed = _last_boxed(OUTSIDE.sub(r"\1\3\2", tail) if "\\boxed" in tail else tail)
    if boxed is not None:
        return boxed.strip()
    tagged = TAGGED.findall(tail)
    return (tagged[-1] if tagged else tail).strip()


def _last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`, with all its braces; None without one."""
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in BRACE.finditer(text):
        if match[0].endswith("{") and match[0] != "\\{":
            opened.append((match.end(), len(match[0]) > 1))
        elif match[0] == "}" and opened:
            start, is_boxed = opened.pop()
            if is_boxed and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[last[0] : last[1]]


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a text. A percentage has the value before its sign."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: "Number") -> bool:
        """Return whether both are the same number; "50%" equals both 50 and 0.5."""
        if self.value == other.value or self.is_percent == other.is_percent:
            return self.value == other.value
        percent, plain = (self, other) if self.is_percent else (other, self)
        return percent.value / 100 == plain.value


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number of a text; None if it has none that can be read.

    Example: "so 1,250.50 in all" is 1250.5.
    """
    number = read_number(text)
    return None if number is None else number.value


def read_number(text: str) -> Number | None:
    """Return the last number of a text; None if it has none that can be read."""
    text = plain_digits(text)
    last: re.Match[str] | None = None
    for match in NUMBER.finditer(text):
        is_exponent = EXPONENT.search(text, max(0, match.start() - 6), match.start())
        if is_exponent is None:
            last = match
    if last is None or _is_irrational(text, last):
        return None
    try:
        value = _value(last)
    except (ArithmeticError, ValueError):  # Over the limits, or divided by 0.
        return None
    return None if value is None else Number(value, bool(last["percent"]))


def _is_irrational(text: str, match: re.Match[str]) -> bool:
    """Return whether a number is under a root, a factor of a root or of pi, or divides a term."""
    around = max(0, match.start() - 12), match.start()
    before = ROOT.search(text, *around) or DIVISOR.search(text, *around)
    return bool(before or FACTOR.match(text, match.end()))


def plain_digits(text: str) -> str:
    """Return a text whose digits, signs, fractions and exponents are written in ASCII."""
    text = ascii_digits(text).replace("\\!", "").replace("{-}", "-")
    text = RAISED.sub(r"^{\1}", FONT.sub(r"\1", text))
    text = LATEX_SPACE.sub(" ", GROUPED.sub("", text))
    text = LATEX_FRACTION.sub(_plain_fraction, text)
    text = WHOLE.sub(r"\1\2\3", text)
    text = UNIT.sub(r"\1^", CURRENCY.sub("$", text))
    text = BRACKETED.sub(r"\1\2", plain_signs(text))
    text = SPACED.sub(lambda m: m[0].replace(" ", ""), text)
    return BOLD.sub(r";\1 ", text)


def plain_signs(text: str) -> str:
    """Return a text whose negative numbers have the sign before their first digit."""
    text = OUTSIDE.sub(r"\1\3\2", NEGATIVE.sub(r"\1-", text))
    text = MARKED.sub(r"\1\5 ", text)
    for sign in (APART, ALONE):
        text = sign.sub(r"\1", text)
    return text


def ascii_digits(text: str) -> str:
    """Return a text with ASCII digits and signs; superscripts become "^2", a half "1/2"."""
    text = text.translate(CHARACTERS)
    if text.isascii():
        return text
    text = SUPERSCRIPT.sub(lambda m: "^" + m[0].translate(SUPERSCRIPTS), text)
    return OTHER_DIGIT.sub(_ascii_digit, text)


def _ascii_digit(match: re.Match[str]) -> str:
    """Return the ASCII digit of another script, or the parts of a fraction such as a half."""
    char = match[0]
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    if not unicodedata.decomposition(char).startswith("<fraction>"):
        return char
    share = Fraction(unicodedata.numeric(char)).limit_denominator(10)
    is_mixed = match.start() and match.string[match.start() - 1].isdigit()
    return f"{' ' if is_mixed else ''}{share.numerator}/{share.denominator}"


def _plain_fraction(match: re.Match[str]) -> str:
    """Return a fraction of LaTeX as a/b, with a space after the whole part of a mixed number."""
    above, below = (match[1] or match[2]).replace(" ", ""), (match[3] or match[4]).replace(" ", "")
    is_mixed = match.start() and match.string[match.start() - 1].isdigit()
    return f"{' ' if is_mixed else ''}{above}/{below}"


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of NUMBER; None if it is no single number.

    Raises: ArithmeticError, ValueError: it is beyond the limits, or divided by 0.
    """
    value = _decimal(match["digits"])
    if value is None:
        return None
    for name in ("power", "ten"):
        if match[name] is not None:
            value *= _power(Fraction(10), match[name])
    for name in ("raised", "inside"):
        if match[name] is not None:
            value = _power(value, match[name])
    if match["part"] is not None:
        value += _fraction(match["part"]) / _fraction(match["whole"])
    if match["below"] is not None:
        sign = -1 if match["below"].startswith("-") else 1
        below = _decimal(match["below"].lstrip("+-"))
        if below is None:
            return None
        value = sign * value / below
    return -value if match["sign"].startswith("-") else value


def _decimal(run: str) -> Fraction | None:
    """Return a run of digits, points and commas as a number; None: it is none.

    Groups of thousands have commas, or points if a decimal comma or two points show it. A single
    comma before fewer or more digits is a decimal comma. Other commas separate a list, whose last
    number counts.
    """
    run = run.rstrip(".,")
    points, commas = run.count("."), run.count(",")
    if not commas and points <= 1:
        return _fraction(run)
    if commas == 1 and points and run.rindex(".") < run.index(","):
        whole, _, decimals = run.partition(",")
        return (
            _fraction(f"{whole.replace('.', '')}.{decimals}") if _is_grouped(whole, ".") else None
        )
    if points > 1:
        return _fraction(run.replace(".", "")) if not commas and _is_grouped(run, ".") else None
    whole, point, decimals = run.partition(".")
    if _is_grouped(whole, ","):
        return _fraction(whole.replace(",", "") + point + decimals)
    if commas == 1 and not points:
        return _fraction(run.replace(",", "."))
    return _fraction(run.rpartition(",")[2])


def _is_grouped(whole: str, separator: str) -> bool:
    """Return whether separators group the digits as thousands, or as lakhs after a comma."""
    first, *groups = whole.split(separator)
    sizes = (2, 3) if separator == "," else (3,)
    is_first = 1 <= len(first) <= 3 and first[0] != "0"
    is_last = bool(groups) and len(groups[-1]) == 3
    return is_first and is_last and all(len(group) in sizes for group in groups)


def _fraction(digits: str) -> Fraction:
    """Return decimal digits as a fraction. Raises: ValueError: there are too many."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return Fraction(Decimal(digits))  # An int refuses texts of more than 4,300 digits.


def _power(base: Fraction, exponent: str) -> Fraction:
    """Return a power.

    Raises: ValueError, ArithmeticError: it is too large, 0 is inverted, or the exponent is no
        whole number.
    """
    if len(exponent) > 7:
        raise ValueError(f"an exponent of {len(exponent)} digits")
    num_bits = base.numerator.bit_length() + base.denominator.bit_length()
    if num_bits * abs(int(exponent)) > 4 * MAX_DIGITS:
        raise ValueError(f"the power {exponent} of a number of {num_bits} bits")
    return base ** int(exponent)


def last_match(pattern: str, text: str) -> str:
    """Return the last match of a regular expression, or its only group; "" for none."""
    expression = re.compile(pattern)
    texts = [match[expression.groups] for match in expression.finditer(text)]
    return str(texts[-1] or "") if texts else ""


def exact_number(completion: str, ground_truth: str) -> float:
    """Return 1 if the answer's last number equals that of the reference, else 0.

    Raises: ValueError: the reference answer holds no number.
    """
    wanted = read_number(final_answer(str(ground_truth)))
    if wanted is None:
        raise ValueError(f"the reference answer {str(ground_truth)!r:.100} holds no number")
    number = read_number(final_answer(completion))
    return float(number is not None and number.equals(wanted))


def exact_text(completion: str, ground_truth: str) -> float:
    """Return 1 if the final answer equals the reference, apart from case and spaces, else 0.

    Raises: ValueError: there is no reference answer.
    """
    _check_reference(ground_truth)
    answer, wanted = (
        " ".join(unicodedata.normalize("NFC", final_answer(str(text))).casefold().split())
        for text in (completion, ground_truth)
    )
    return float(answer == wanted)


def _check_reference(ground_truth: Any) -> None:
    """Raise ValueError if a record has no reference answer."""
    if ground_truth is None or not str(ground_truth).strip():
        raise ValueError("the record has no reference answer")


def none(completion: str) -> float:
    """Return 0 for each answer: only functions over a group pay (`groups.reward`)."""
    del completion
    return 0.0


def math(completion: str, ground_truth: str) -> float:
    """Return 1 if math-verify finds the answer equal to the reference, else 0.

    Raises: ValueError: there is no reference answer, or math-verify cannot read it.
    """
    _check_reference(ground_truth)
    library = importlib.import_module("math_verify")
    # Its own time limits use signals, which only the main thread receives. The caller has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns of each call.
    reference = _as_latex(final_answer(str(ground_truth)))
    gold = library.parse(f"${reference}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the reference answer {ground_truth!r:.100}")
    final = final_answer(completion)
    # math-verify reads only the first number of a formula without marks, such as "2\sqrt{3}".
    is_formula = final != completion.strip() or not PROSE.search(COMMAND.sub("", final))
    final = _as_latex(final)
    answer = library.parse(f"${final}$" if is_formula else final, parsing_timeout=None)
    return float(library.verify(gold, answer, timeout_seconds=None))


def _as_latex(text: str) -> str:
    """Return a text whose long numbers, mixed numbers, signs and roots math-verify can read."""
    text = SPACED.sub(lambda m: m[0].replace(" ", ""), GROUPED.sub("", ascii_digits(text)))
    text = MIXED.sub(r"\1\\frac{\2}{\3}", plain_signs(text))
    return RADICAL.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)


@lru_cache(maxsize=256)
def _generator(task: str, options: str, seed: int) -> Any:
    """Return a generator of reasoning-gym. With seed 0 its item number n is that of seed n."""
    library = importlib.import_module("reasoning_gym")
    return library.create_dataset(task, **json.loads(options), seed=seed, size=1)


def generated_entry(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the generator of a record and its entry, made from the record's seed.

    Some generators iterate over sets, so the process must have a fixed PYTHONHASHSEED.
    """
    options = json.dumps(record["options"], sort_keys=True)
    seed = int(record["seed"])
    # Some generators draw from the process-wide random generators.
    random.seed(seed)
    importlib.import_module("numpy").random.seed(seed % 2**32)
    generator = _generator(record["task"], options, 0)
    try:
        return generator, generator[seed]
    except IndexError:  # A few generators make all their items at their start.
        generator = _generator(record["task"], options, seed)
        return generator, generator[0]


def generated_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question and the reference answer of the entry of a record."""
    _, entry = generated_entry(record)
    return {"question": entry["question"], "answer": entry["answer"]}


def verifier(completion: str, record: Mapping[str, Any]) -> float:
    """Return the score of an answer, in [0, 1], by the verifier of the generated task.

    The answer is the content of the last <answer> tags, or else the final answer.

    Raises: ValueError: as `verified`, or the entry is not that of the record.
    """
    generator, entry = generated_entry(record)
    for name in ("question", "answer"):
        if str(entry[name]) != str(record[name]):
            raise ValueError(
                f"{record['task']} generates another {name} from the seed {record['seed']} than"
                f" that of the record: {entry[name]!r:.100}, not {record[name]!r:.100}"
            )
    tagged = TAGGED.findall(completion)
    answer = tagged[-1].strip() if tagged else final_answer(completion)
    return verified(generator, entry, answer, task=record["task"])


def verified(generator: Any, entry: Mapping[str, Any], answer: str, *, task: str) -> float:
    """Return the score of an answer by a generator of reasoning-gym.

    Raises: ValueError: the verifier fails on its own reference answer, too, or there is none.
    """
    try:
        score = float(generator.score_answer(answer, entry))
        return 1.0 if 1.0 < score < 1.0 + ROUNDING_ERROR else score
    except Exception as error:
        # Some verifiers raise an error for a text that is no answer. So the verifier must work on
        # the reference answer.
        where = f"the verifier of {task} failed: {type(error).__name__}: {error}"
        if entry["answer"] is None:
            raise ValueError(f"{where}; no reference answer shows that it works") from error
        if not _accepts(generator, entry):
            raise ValueError(f"{where}; it fails on the reference answer, too") from error
        return 0.0


def _accepts(generator: Any, entry: Mapping[str, Any]) -> bool:
    """Return whether a verifier scores its own reference answer without an error."""
    try:
        generator.score_answer(entry["answer"], entry)
    except Exception:  # noqa: BLE001 - a verifier's errors are of any type.
        return False
    return True


GRADERS: dict[str, Callable[..., float]] = {
    "exact_number": exact_number,
    "exact_text": exact_text,
    "math": math,
    "verifier": verifier,
    "none": none,
}
LIBRARIES = {
    "math": "math_verify",
    "verifier": "reasoning_gym",
}  # Packages that may take any time for an answer.
