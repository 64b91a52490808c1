"""The things of the generated world and their facts, drawn from one seed."""

import random
from dataclasses import dataclass, field

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
