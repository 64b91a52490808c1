"""The relations of the generated world, with their statements and questions."""

from dataclasses import dataclass

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
