"""Questions of the seven datasets by item: rows in the format of Search-R1 and FlashRAG."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.text import counted
from envhub.env import EnvFailure, ItemId, SubsetSpec, UnknownItem
from envhub.envs.searchqa.lines import LineFile, count_lines, find_lines
from envhub.tables import read_table

DATASETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")
SPLITS = ("train", "test")
MAX_TURNS = 10
AGENTGYM_RANGES: list[tuple[int, int, str, str]] = read_table(__file__, "agentgym.yaml")


@dataclass(frozen=True, slots=True)
class Hop:
    """One fact on the way to the answer: `query` finds passage `title` with the text `evidence`."""

    query: str
    title: str
    evidence: str


@dataclass(frozen=True, slots=True)
class SearchQuestion:
    """A question, all accepted answers, and the hops to them if known."""

    text: str
    golden_answers: tuple[str, ...]
    hops: tuple[Hop, ...]


class QuestionBank(Protocol):
    """A source of the items' questions."""

    def subsets(self) -> Mapping[str, SubsetSpec]:
        """Return the subsets that have questions."""
        ...

    def question(self, item: ItemId) -> SearchQuestion:
        """Return the question of an item. Raises EnvFailure if its file has changed."""
        ...


def make_question(row: object) -> SearchQuestion:
    """Return the question of a row.

    The answers are in `golden_answers`, `answers` or `answer` (one or several), or in Search-R1's
    field for its trainer, `reward_model.ground_truth.target`. A missing question mark is added.

    Raises: ValueError: no question, or no answer.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("question"), str):
        raise ValueError("a question must have the fields id, question and golden_answers")
    text = row["question"].strip()
    if not text:
        raise ValueError("the question is empty")
    answers = _answers(row)
    if not answers:
        raise ValueError("the question has no golden_answers")
    metadata = row.get("metadata")
    hops = metadata.get("hops", []) if isinstance(metadata, Mapping) else []
    return SearchQuestion(
        text if text.endswith("?") else text + "?",
        tuple(answers),
        tuple(Hop(hop["query"], hop["title"], hop["evidence"]) for hop in hops),
    )


def _answers(row: Mapping) -> list[str]:
    """Return the accepted answers of a row, in any of the known formats."""
    answers = next(
        (row[key] for key in ("golden_answers", "answers", "answer") if row.get(key)), None
    )
    if answers is None:
        answers = row.get("reward_model") or {}
        for key in ("ground_truth", "target"):
            answers = answers.get(key) or {} if isinstance(answers, Mapping) else {}
    answers = [answers] if isinstance(answers, str | int | float) else answers
    if not isinstance(answers, list):
        return []
    return [str(answer).strip() for answer in answers if str(answer).strip()]


def question_path(folder: Path, subset: str, split: str) -> Path:
    """Return the path of a dataset's questions."""
    return folder / f"{subset}_{split}.jsonl"


class QuestionFiles:
    """Questions in files, <dataset>_<train|test>.jsonl; each line is read on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, LineFile] = {}
        self._lock = threading.Lock()

    def subsets(self) -> Mapping[str, SubsetSpec]:
        """Count the lines of the files; see `QuestionBank.subsets`."""
        sizes = {name: [self._count(name, split) for split in SPLITS] for name in DATASETS}
        return {
            name: SubsetSpec(num_train=num_train, num_test=num_test, max_turns=MAX_TURNS)
            for name, (num_train, num_test) in sizes.items()
            if num_train or num_test
        }

    def _count(self, subset: str, split: str) -> int:
        """Return the number of questions in a file; 0 without it."""
        path = question_path(self._folder, subset, split)
        return count_lines(path) if path.is_file() else 0

    def question(self, item: ItemId) -> SearchQuestion:
        """See `QuestionBank.question`."""
        path = question_path(self._folder, item.subset, item.split)
        lines = self._open(path)
        if item.index >= len(lines):
            raise EnvFailure(f"{path} has become shorter since the hub was started")
        try:
            return make_question(json.loads(lines.line(item.index)))
        except (ValueError, KeyError, TypeError) as error:
            raise EnvFailure(f"{path}, question {item.index}: {error}") from error

    def _open(self, path: Path) -> LineFile:
        """Return a question file, which is indexed once."""
        with self._lock:
            if path.name not in self._files:
                try:
                    bounds = find_lines(path)
                except OSError as error:
                    raise EnvFailure(f"{path} cannot be read: {error.strerror}") from error
                self._files[path.name] = LineFile(path, bounds)
            return self._files[path.name]


def agentgym_item(index: int, subsets: Mapping[str, SubsetSpec], *, wrap: bool) -> str:
    """Return the item id of AgentGym's data index.

    Args:
        index: 0 to 221327; the files must then be the full sets in their usual order.
        wrap: an index beyond the end of its subset wraps around to the subset's start; for
            questions that replace the datasets.

    Raises: UnknownItem: not an index, or the subset has no such question.
    """
    for first, end, subset, split in AGENTGYM_RANGES:
        if first <= index < end:
            spec = subsets.get(subset)
            num_items = 0 if spec is None else getattr(spec, f"num_{split}")
            place = (index - first) % num_items if wrap and num_items else index - first
            if place >= num_items:
                raise UnknownItem(
                    f"{subset}_{split}.jsonl has {counted(num_items, 'question')}, so no {place}"
                )
            return f"{subset}-{split}-{place}"
    raise UnknownItem(f"no item {index}; AgentGym's items are 0 to {AGENTGYM_RANGES[-1][1] - 1}")


def question_files(folder: Path) -> list[Path]:
    """Return the existing question files."""
    paths = [question_path(folder, subset, split) for subset in DATASETS for split in SPLITS]
    return [path for path in paths if path.is_file()]


def first_faults(folder: Path) -> Sequence[str]:
    """Return a line for each question file whose first question is unreadable."""
    faults = []
    for path in question_files(folder):
        try:
            with open(path, encoding="utf-8") as file:
                make_question(json.loads(next(line for line in file if not line.isspace())))
        except StopIteration:
            faults.append(f"{path} is empty; delete it or fill it")
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(f"{path} cannot be read: {error}")
    return faults
