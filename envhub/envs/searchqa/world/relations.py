"""What can be said and asked about the things of the generated world."""

from dataclasses import dataclass

from envhub.tables import read_table


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: of each thing of `kind` it has at most one value; see `relations.yaml`.

    Attributes:
        target: kind of the value; "" when it is a number or a plain word.
        asks: the question as a search, in a quiz and as from a table.
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
