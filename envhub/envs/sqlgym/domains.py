"""The designs of the generated databases, of the table `domains.yaml`."""

from collections.abc import Mapping
from typing import Any

from envhub.envs.sqlgym.schema import Column, Domain, Kind, Table
from envhub.tables import read_table


def _table(name: str, row: Mapping[str, Any]) -> Table:
    columns = tuple(_column(each, facts) for each, facts in row["columns"].items())
    key = Column(name="id", label="id", kind=Kind.KEY)
    return Table(
        name=name, one=row["row"], many=name, num_rows=row["num_rows"], columns=(key, *columns)
    )


def _column(name: str, facts: Mapping[str, Any]) -> Column:
    if "refers" in facts:
        label = name.replace("_", " ")
        return Column(name=name, label=label, kind=Kind.REFERENCE, table=facts["refers"])
    label = facts.get("label", name)
    if "words" in facts:
        return Column(name=name, label=label, kind=Kind.CATEGORY, words=tuple(facts["words"]))
    if "range" in facts:
        low, high = facts["range"]
        num_decimals = facts.get("decimals", 0)
        return Column(
            name=name, label=label, kind=Kind.NUMBER, low=low, high=high, num_decimals=num_decimals
        )
    return Column(name=name, label=label, kind=Kind.NAME)


_DESIGNS = read_table(__file__, "domains.yaml")
TEST_DOMAINS = tuple(
    Domain(name=name, tables=tuple(_table(each, row) for each, row in tables.items()))
    for name, tables in _DESIGNS["domains"].items()
)
TRAIN_DOMAINS = tuple(domain for domain in TEST_DOMAINS if domain.name in _DESIGNS["train"])
