"""The generated world: its corpus and its questions, in memory or as files."""

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from envhub.envs.searchqa.world.things import NOUN_BEFORE_NAME, RELATIONS, Relation, Thing, Things
from envhub.tables import read_table

Row = dict[str, object]

QUESTIONS = read_table(__file__, "questions.yaml")


@dataclass(frozen=True, slots=True)
class QuestionDraft:
    """A question before it becomes a row; `hops` are (thing, relation) in order."""

    text: str
    answers: tuple[str, ...]
    hops: tuple[tuple[Thing, Relation], ...]
    sort: str


class Drafts:
    """Draws questions about things of one split."""

    def __init__(self, things: Things, rng: random.Random, *, is_test: bool) -> None:
        self._rng = rng
        self._starts = {
            kind: [thing for thing in of_one if thing.is_test == is_test]
            for kind, of_one in things.by_kind.items()
        }
        self._kinds = list(self._starts)

    def single(self, wording: int) -> QuestionDraft:
        """Draw a question of one hop; `wording` selects one of the relation's questions."""
        return self._chain(1, wording=wording, sort="single")

    def composed(self, num_hops: int, *, by_clause: bool = False) -> QuestionDraft:
        """Draw a question of several hops, each about the answer of the previous one."""
        return self._chain(num_hops, by_clause=by_clause, sort=f"{num_hops}hop")

    def inferred(self) -> QuestionDraft:
        """Draw a question with a single name for two hops, such as grandfather."""
        first, second, text = self._rng.choice(QUESTIONS["inferences"])
        while True:
            person = self._rng.choice(self._starts["person"])
            between = person.facts.get(first)
            if isinstance(between, Thing) and second in between.facts:
                hops = ((person, _relation(person, first)), (between, _relation(between, second)))
                answers = _answers(between.facts[second])
                return QuestionDraft(text.format(person.name), answers, hops, "inference")

    def compared(self) -> QuestionDraft:
        """Draw a question that compares a number of two things."""
        kind, key, text, lower_wins = self._rng.choice(QUESTIONS["comparisons"])
        while True:
            pair = self._rng.sample(self._starts[kind], 2)
            values = [_number(str(thing.facts[key])) for thing in pair]
            if values[0] != values[1]:
                winner = pair[_winner_index(values, lower_wins)]
                hops = tuple((thing, _relation(thing, key)) for thing in pair)
                return QuestionDraft(_about(text, pair), _names(winner), hops, "comparison")

    def compared_beyond(self) -> QuestionDraft:
        """Draw a comparison of two things by a number of their related things."""
        kind, first, second, text, lower_wins = self._rng.choice(QUESTIONS["bridge_comparisons"])
        while True:
            pair = self._rng.sample(self._starts[kind], 2)
            between = [_thing(one.facts[first]) for one in pair]
            values = [_number(str(thing.facts[second])) for thing in between]
            if values[0] != values[1]:
                winner = pair[_winner_index(values, lower_wins)]
                hops = tuple(
                    hop
                    for thing, other in zip(pair, between, strict=True)
                    for hop in ((thing, _relation(thing, first)), (other, _relation(other, second)))
                )
                return QuestionDraft(_about(text, pair), _names(winner), hops, "bridge-comparison")

    def same(self) -> QuestionDraft:
        """Draw a yes-or-no question; both answers are equally likely."""
        kind, key, text = self._rng.choice(QUESTIONS["sameness"])
        is_yes = self._rng.random() < 0.5
        while True:
            one = self._rng.choice(self._starts[kind])
            others = [
                other
                for other in self._starts[kind]
                if other is not one and (other.facts[key] == one.facts[key]) == is_yes
            ]
            if others:
                pair = [one, self._rng.choice(others)]
                hops = tuple((thing, _relation(thing, key)) for thing in pair)
                return QuestionDraft(
                    _about(text, pair), ("yes" if is_yes else "no",), hops, "sameness"
                )

    def _chain(
        self, num_hops: int, *, wording: int = 0, by_clause: bool = False, sort: str
    ) -> QuestionDraft:
        """Draw a question along a chain of facts that never returns to a thing."""
        while True:
            thing = self._rng.choice(self._starts[self._rng.choice(self._kinds)])
            noun = start = _noun(thing)
            hops: list[tuple[Thing, Relation]] = []
            seen = [thing]
            for place in range(num_hops):
                is_last = place == num_hops - 1
                known = [one for one in RELATIONS[thing.kind] if one.key in thing.facts]
                fitting = [one for one in known if is_last or one.target]
                if not fitting:
                    break
                relation = self._rng.choice(fitting)
                value = thing.facts[relation.key]
                hops.append((thing, relation))
                if is_last:
                    text = relation.asks[wording].format(noun)
                    answers = _answers(value)
                    if value not in seen and answers[0] not in start:
                        return QuestionDraft(text[0].upper() + text[1:], answers, tuple(hops), sort)
                    break
                thing = _thing(value)
                if thing in seen:
                    break
                noun = (relation.clause if by_clause else relation.phrase).format(noun)
                seen.append(thing)


def make_rows(things: Things, subset: str, split: str, num_rows: int) -> list[Row]:
    """Return the rows of a subset, without duplicates; the same on every machine."""
    rng = random.Random(f"{subset}/{split}")
    draw = DRAWS[subset]
    drafts = Drafts(things, rng, is_test=split == "test")
    rows: dict[str, Row] = {}
    while len(rows) < num_rows:
        draft = draw(drafts, rng)
        if draft.text not in rows:
            text = draft.text.lower().rstrip("?") if subset == "nq" else draft.text
            rows[draft.text] = {
                "id": f"{split}_{len(rows)}",
                "question": text,
                "golden_answers": list(draft.answers),
                "data_source": subset,
                "metadata": {"type": draft.sort, "hops": list(_hops(draft))},
            }
    return list(rows.values())


def _hops(draft: QuestionDraft) -> Iterator[dict[str, str]]:
    """Yield the facts that answer a question, as metadata of its row."""
    for thing, relation in draft.hops:
        evidence = _answers(thing.facts[relation.key])[0]
        query = f"{thing.name} {relation.query}"
        yield {"query": query, "title": thing.name, "evidence": evidence}


def _hotpotqa(drafts: Drafts, rng: random.Random) -> QuestionDraft:
    """Draw a question in the style of HotpotQA."""
    return rng.choice((lambda: drafts.composed(2), drafts.compared, drafts.same))()


def _2wiki(drafts: Drafts, rng: random.Random) -> QuestionDraft:
    """Draw a question in the style of 2WikiMultihopQA."""
    ways = (
        lambda: drafts.composed(2), drafts.inferred, drafts.compared, drafts.compared_beyond
    )  # fmt: skip
    return rng.choice(ways)()


DRAWS: dict[str, Callable[[Drafts, random.Random], QuestionDraft]] = {
    "nq": lambda drafts, _: drafts.single(0),
    "triviaqa": lambda drafts, _: drafts.single(1),
    "popqa": lambda drafts, _: drafts.single(2),
    "hotpotqa": _hotpotqa,
    "2wiki": _2wiki,
    "musique": lambda drafts, rng: drafts.composed(rng.choice((2, 2, 3, 3, 4))),
    "bamboogle": lambda drafts, _: drafts.composed(2, by_clause=True),
}


def _relation(thing: Thing, key: str) -> Relation:
    """Return a relation of a thing by its key."""
    return next(relation for relation in RELATIONS[thing.kind] if relation.key == key)


def _thing(value: Thing | str) -> Thing:
    """Return a fact's value as a thing."""
    assert isinstance(value, Thing)
    return value


def _names(thing: Thing) -> tuple[str, ...]:
    """Return the accepted names of a thing as the answer of a comparison."""
    return tuple(dict.fromkeys((thing.name, _noun(thing))))


def _noun(thing: Thing) -> str:
    """Return a thing's name, with a noun before it if the name needs one."""
    return NOUN_BEFORE_NAME.get(thing.kind, "") + thing.name


def _about(text: str, pair: list[Thing]) -> str:
    """Return a wording about two things."""
    return text.format(a=_noun(pair[0]), b=_noun(pair[1]))


def _winner_index(values: list[int], lower_wins: bool) -> int:
    """Return 0 or 1: the index of the smaller value if `lower_wins`, else of the larger one."""
    return int((values[1] < values[0]) == lower_wins)


def _number(text: str) -> int:
    """Return the number at the start of a text."""
    return int(text.split()[0].replace(",", ""))


def _answers(value: Thing | str) -> tuple[str, ...]:
    """Return all accepted forms of a value; the first is that of the passage."""
    if isinstance(value, Thing):
        country = value.facts.get("country")
        if isinstance(country, Thing):
            return value.name, f"{value.name}, {country.name}"
        return (value.name,)
    number, _, unit = value.partition(" ")
    short = {"kilometres": "km", "metres": "m"}.get(unit)
    return (value,) if short is None else (value, f"{number} {short}", number)


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
