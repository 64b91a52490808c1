"""The generated world: its corpus and its questions, in memory or as files."""

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
from envhub.tables import read_table


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: each thing of `kind` has at most one value; see `relations.yaml`.

    Attributes:
        target: kind of the value; "" for a number or a plain word.
        asks: the question as a search, as in a quiz, and as from a table.
    """

    kind: str
    key: str
    phrase: str
    clause: str
    asks: tuple[str, str, str]
    query: str
    sentence: str
    target: str = ""


_TABLE = read_table(__file__, "relations.yaml")
RELATIONS = {
    kind: [Relation(kind=kind, key=key, **words) for key, words in facts.items()]
    for kind, facts in _TABLE["relations"].items()
}
NOUN_BEFORE_NAME: dict[str, str] = _TABLE["nouns"]


WORDS = {key: tuple(text.split()) for key, text in read_table(__file__, "words.yaml").items()}

NUM_THINGS = {
    "country": 30, "city": 200, "river": 80, "mountain": 80, "university": 60, "museum": 60,
    "company": 140, "band": 100, "team": 80, "film": 280, "novel": 260, "album": 160,
    "painting": 140,
}  # fmt: skip
GENERATION_SIZES = (300, 300, 260)
FIRST_BIRTH_YEAR = 1880
YEARS = {"university": (1400, 1900)}  # Founding years. All other years are in `USUAL_YEARS`.
USUAL_YEARS = (1920, 2020)
TEST_FRAC = 0.2
CREATORS = ("director", "star", "composer", "author", "artist")
NUM_CREATORS = 70  # Number of people per trade; most have several works.


class NameGenerator:
    """Draws unique invented names. They depend on the generator and the order of the draws."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: dict[str, None] = {}

    def word(self) -> str:
        """Return an invented word of two or three syllables, such as "Brandelk"."""
        rng = self._rng
        while True:
            middle = "".join(
                rng.choice(WORDS["vowels"]) + rng.choice(WORDS["middles"])
                for _ in range(rng.choice((1, 1, 2)))
            )
            name = (
                rng.choice(WORDS["onsets"]) + middle + rng.choice(WORDS["endings"])
            ).capitalize()
            if name not in self._taken:
                self._taken[name] = None
                return name

    def person(self, surname: str, *, is_woman: bool) -> str:
        """Return a full name with `surname`."""
        while True:
            name = f"{self._rng.choice(WORDS['women' if is_woman else 'men'])} {surname}"
            if name not in self._taken:
                self._taken[name] = None
                return name

    def title(self) -> str:
        """Return a title of a work, such as "The Silent Harbour of Brandelk"."""
        adjective = self._rng.choice(WORDS["adjectives"])
        noun = self._rng.choice(WORDS["nouns"])
        form = self._rng.choice(
            ("The {a} {n} of {w}", "The {n} of {w}", "{a} {w}", "{w} and the {n}")
        )
        return form.format(a=adjective, n=noun, w=self.word())


@dataclass(eq=False, slots=True)
class Thing:
    """One thing with its facts by relation key; a value is another thing or a text."""

    kind: str
    name: str
    is_test: bool = False
    facts: dict[str, "Thing | str"] = field(default_factory=dict)


class Things:
    """All things by kind, in the order of their draws."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._names = NameGenerator(self._rng)
        self.by_kind: dict[str, list[Thing]] = {}
        for kind, num_things in NUM_THINGS.items():
            self.by_kind[kind] = [Thing(kind, self._name(kind)) for _ in range(num_things)]
        people = self.by_kind["person"] = self._draw_people()
        self._creators = {trade: self._rng.sample(people, NUM_CREATORS) for trade in CREATORS}
        for kind, things in self.by_kind.items():
            for thing in things:
                self._fill(thing)
            order = list(things)
            random.Random(f"{seed}/{kind}").shuffle(order)
            for thing in order[: round(len(order) * TEST_FRAC)]:
                thing.is_test = True
        self._crown_capitals()

    def all(self) -> list[Thing]:
        """Return every thing, in a fixed order."""
        return [thing for things in self.by_kind.values() for thing in things]

    def _name(self, kind: str) -> str:
        """Return a new name for a thing of a kind."""
        if kind in ("film", "novel", "album", "painting"):
            return self._names.title()
        word = self._names.word()
        if kind == "company":
            return f"{word} {self._rng.choice(('Works', 'Brothers', 'Trading', 'Union'))}"
        if kind == "mountain":
            return f"Mount {word}"
        if kind == "band":
            return f"The {word} {self._rng.choice(('Quartet', 'Ensemble', 'Collective', 'Trio'))}"
        if kind == "team":
            return f"{word} {self._rng.choice(('Rovers', 'Falcons', 'Wolves', 'United'))}"
        return f"{word} {kind.capitalize()}" if kind in ("university", "museum") else word

    def _draw_people(self) -> list[Thing]:
        """Draw three generations; the couples of one generation are the parents of the next."""
        rng = self._rng
        people = []
        couples = []
        for age, size in enumerate(GENERATION_SIZES):
            families = list(couples)
            couples = []
            for number in range(size):
                is_woman = number % 2 == 0
                parents = rng.choice(families) if families else None
                surname = parents[0].name.split()[1] if parents else self._names.word()
                person = Thing("person", self._names.person(surname, is_woman=is_woman))
                person.facts["birth_year"] = str(FIRST_BIRTH_YEAR + 45 * age + rng.randrange(18))
                if parents:
                    person.facts["father"], person.facts["mother"] = parents
                if not is_woman and not _are_siblings(person, people[-1]) and rng.random() < 0.8:
                    person.facts["spouse"], people[-1].facts["spouse"] = people[-1], person
                    couples.append((person, people[-1]))
                people.append(person)
        return people

    def _fill(self, thing: Thing) -> None:
        """Draw the missing facts; a person can lack an employer."""
        for relation in RELATIONS[thing.kind]:
            if relation.key in thing.facts or relation.key in ("father", "mother", "spouse"):
                continue
            if relation.key == "employer" and self._rng.random() < 0.5:
                continue
            if relation.target:
                others = self._creators.get(relation.key, self.by_kind[relation.target])
                thing.facts[relation.key] = self._rng.choice(others)
            else:
                thing.facts[relation.key] = self._word(thing.kind, relation.key)

    def _word(self, kind: str, key: str) -> str:
        """Return the value of a fact that is not another thing."""
        rng = self._rng
        if key == "year":
            return str(rng.randrange(*YEARS.get(kind, USUAL_YEARS)))
        if key == "population":
            return f"{rng.randrange(9_000, 900_000):,}"
        if key == "length":
            return f"{rng.randrange(60, 2_900):,} kilometres"
        if key == "height":
            return f"{rng.randrange(900, 7_900):,} metres"
        if key == "currency":
            return self._names.word().lower()
        return rng.choice(WORDS[key])

    def _crown_capitals(self) -> None:
        """Place each capital in its own country; a city is the capital of at most one country."""
        cities = self._rng.sample(self.by_kind["city"], len(self.by_kind["country"]))
        for country, city in zip(self.by_kind["country"], cities, strict=True):
            country.facts["capital"] = city
            city.facts["country"] = country


def _are_siblings(one: Thing, other: Thing) -> bool:
    return "father" in one.facts and one.facts["father"] is other.facts.get("father")


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
                relations = [one for one in RELATIONS[thing.kind] if one.key in thing.facts]
                fitting = [one for one in relations if is_last or one.target]
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
