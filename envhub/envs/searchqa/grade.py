"""Grading of answers: exact match and F1 after SQuAD's normalisation."""

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return `text` in lower case without punctuation, articles and surplus spaces.

    A text of nothing else, such as "The", is only changed to lower case, so that an empty answer
    never equals it. SQuAD has no such exception.

    Source: SQuAD's evaluation, arXiv 1606.05250.
    """
    bare = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION))
    return " ".join(bare.split()) or " ".join(text.lower().split())


def exact_match(answer: str, golden_answers: Sequence[str]) -> float:
    """Return 1 if the answer equals any golden answer after normalisation, else 0."""
    given = normalise(answer)
    return float(any(given == normalise(golden) for golden in golden_answers))


def f1(answer: str, golden_answers: Sequence[str]) -> float:
    """Return the best F1 in [0, 1] of the answer's words over the golden answers.

    Yes, no and "noanswer" cannot match in part: they count only as a whole.

    Source: HotpotQA's evaluation, arXiv 1809.09600.
    """
    return max(
        (_f1(normalise(answer), normalise(golden)) for golden in golden_answers), default=0.0
    )


def _f1(given: str, golden: str) -> float:
    """Return the F1 of the words of two normalised answers."""
    if given == golden:
        return 1.0
    whole = ("yes", "no", "noanswer")
    if given in whole or golden in whole:
        return 0.0
    given_words = given.split()
    golden_words = golden.split()
    num_same = sum((Counter(given_words) & Counter(golden_words)).values())
    if num_same == 0:
        return 0.0
    precision = num_same / len(given_words)
    recall = num_same / len(golden_words)
    return 2 * precision * recall / (precision + recall)


GRADES = {"em": exact_match, "f1": f1}
