"""The generated world: its corpus and its questions, in memory or as files."""

import json
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from envhub.env import ItemId, SubsetSpec
from envhub.envs.searchqa.passages import Passage
from envhub.envs.searchqa.questions import (
    DATASETS,
    MAX_TURNS,
    SPLITS,
    SearchQuestion,
    make_question,
    question_path,
)
from envhub.envs.searchqa.world.relations import RELATIONS
from envhub.envs.searchqa.world.rows import Row, make_rows
from envhub.envs.searchqa.world.things import Thing, Things

SEED = "world of facts 1"  # Another seed is another world: item ids then refer to other questions.
NUM_TRAIN = 1000
NUM_TEST = {name: 200 if name == "musique" else 100 for name in DATASETS}
CORPUS_FILE = "corpus.jsonl"

WORLD_SUBSETS = {
    name: SubsetSpec(num_train=NUM_TRAIN, num_test=NUM_TEST[name], max_turns=MAX_TURNS)
    for name in DATASETS
}


class FactWorld:
    """A world of invented facts. Train and test questions start from different things."""

    def __init__(self) -> None:
        self._things = Things(SEED)
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._lock = threading.Lock()

    def subsets(self) -> Mapping[str, SubsetSpec]:
        """See `QuestionBank.subsets`."""
        return WORLD_SUBSETS

    def question(self, item: ItemId) -> SearchQuestion:
        """See `QuestionBank.question`."""
        return make_question(self.rows(item.subset, item.split)[item.index])

    def rows(self, subset: str, split: str) -> list[Row]:
        """Return the questions of a subset as rows, drawn on first use."""
        with self._lock:
            if (subset, split) not in self._rows:
                spec = WORLD_SUBSETS[subset]
                num_rows = spec.num_train if split == "train" else spec.num_test
                self._rows[subset, split] = make_rows(self._things, subset, split, num_rows)
            return self._rows[subset, split]

    def passages(self) -> list[Passage]:
        """Return one passage per thing; its title is the thing's name."""
        return [Passage(thing.name, describe(thing)) for thing in self._things.all()]


@cache
def the_world() -> FactWorld:
    """Return the world of this process."""
    return FactWorld()


def describe(thing: Thing) -> str:
    """Return the text of a thing's passage: one sentence per fact."""
    is_person = thing.kind == "person"
    again = thing.name.split()[0] if is_person else "It"
    article = "an" if thing.kind == "album" else "a"
    sentences = [f"{thing.name} is {article} {thing.kind}."]
    for relation in RELATIONS[thing.kind]:
        value = thing.facts.get(relation.key)
        if value is not None:
            words = value.name if isinstance(value, Thing) else value
            sentences.append(f"{again} {relation.sentence.format(words)}.")
    return " ".join(sentences)


def write_world(folder: Path) -> None:
    """Write corpus and questions as files, in the format of the real ones."""
    folder.mkdir(parents=True, exist_ok=True)
    world = the_world()
    corpus = (
        {"id": str(number), "contents": f"{one.title}\n{one.text}"}
        for number, one in enumerate(world.passages())
    )
    _write(folder / CORPUS_FILE, corpus)
    for subset in DATASETS:
        for split in SPLITS:
            _write(question_path(folder, subset, split), world.rows(subset, split))


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
