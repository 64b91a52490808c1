"""Problems about the generated databases."""

import threading
from functools import lru_cache, partial

from envhub.env import ItemId, SubsetSpec
from envhub.envs.sqlgym import database
from envhub.envs.sqlgym.problems import Problem, SchemaView, TableView
from envhub.envs.sqlgym.query import open_image
from envhub.envs.sqlgym.questions import SIZES, TEMPLATES, questions
from envhub.envs.sqlgym.schema import ColumnType, Domain

_MAKING = threading.Lock()  # The first sessions must not all create the same data.
SUBSETS = {
    difficulty: SubsetSpec(num_train=SIZES["train"], num_test=SIZES["test"], max_turns=1)
    for difficulty in TEMPLATES
}


@lru_cache(maxsize=64)
def view_of(domain: Domain) -> SchemaView:
    """Return the agent's view of a design."""
    tables = tuple(
        TableView(
            name=table.name,
            columns=tuple((c.name, c.sql_type.lower(), c.label) for c in table.columns),
            key=("id",),
        )
        for table in domain.tables
    )
    references = tuple(
        (table.name, column.name, column.table, "id")
        for table in domain.tables
        for column in table.of_kind(ColumnType.REFERENCE)
    )
    return SchemaView(name=domain.name, tables=tables, references=references)


def problem_of(item: ItemId) -> Problem:
    """Return the problem of an item of SUBSETS, created on first use."""
    with _MAKING:
        question = questions(item.subset, item.split)[item.index]
        content = database.image(question.database)
    return Problem(
        schema=view_of(database.domain_of(question.database)),
        question=question.text,
        evidence="",
        gold=question.gold,
        open=partial(open_image, content),
    )
