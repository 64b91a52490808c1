"""Texts of the SQL environment, and extraction of a statement from an answer."""

from collections.abc import Mapping
from typing import Any

from envhub.env import Style, action_text
from envhub.envs.sqlgym.problems import Problem, SchemaView
from envhub.envs.sqlgym.query import QueryRefused, Row

MAX_STATE_CHARS = 100
FENCE = "```"


def statement_of(text: str, style: Style) -> str:
    """Return the statement in an answer: the last sql block, or all text before a fence."""
    _, found, after = text.rpartition(f"{FENCE}sql")
    if found:
        return after.partition(FENCE)[0].strip()
    if style is Style.COMPACT:
        text = action_text(text).removeprefix(FENCE)
    return text.partition(FENCE)[0].strip()


def fenced(statement: str) -> str:
    """Return a statement as an action."""
    return f"{FENCE}sql\n{statement}\n{FENCE}"


def first_observation(problem: Problem, style: Style) -> str:
    """Return the database's description and the question.

    The evidence appears in the compact style only; AgentGym omits it.
    """
    if style is Style.AGENTGYM:
        return f"{_schema_text(problem.schema)}\n\n{problem.question}"
    evidence = f"\nhint: {problem.evidence}" if problem.evidence else ""
    return f"{_listed(problem.schema)}\nquestion: {problem.question}{evidence}"


def _schema_text(schema: SchemaView) -> str:
    """Return the description of the package sqlgym, in lower case.

    It has two peculiarities. A key of several columns is left empty. A reference has the name of
    the column after the right one.
    """
    design = schema.design or _design_of(schema)
    tables = [name.lower() for name in design["table_names"]]
    columns = [(table, label.lower()) for table, label in design["column_names"]]
    parts = [f"{schema.name} contains tables such as {', '.join(tables)}."]
    for i, table in enumerate(tables):
        mine = [n for n, (of_table, _) in enumerate(columns) if n and of_table == i]
        keys = [columns[n][1] for n in mine if n in design["primary_keys"]]
        parts.append(f"Table {table} has columns such as {', '.join(columns[n][1] for n in mine)}.")
        parts.append(f"{', '.join(keys)} is the primary key.")
    for pair in design["foreign_keys"]:
        (column, table), (to_column, to_table) = (
            (columns[n % (len(columns) - 1) + 1][1], tables[columns[n][0]]) for n in pair
        )
        parts.append(f"The {column} of {table} is the foreign key of {to_column} of {to_table}.")
    return " ".join(parts)


def _design_of(schema: SchemaView) -> Mapping[str, Any]:
    """Return a design in BIRD's numbered format."""
    places = [(-1, "*", "*")] + [
        (i, name, label)
        for i, table in enumerate(schema.tables)
        for name, _, label in table.columns
    ]
    names = [table.name for table in schema.tables]
    numbers = {(names[i], name): n for n, (i, name, _) in enumerate(places) if i >= 0}
    return {
        "table_names": names,
        "column_names": [(i, label) for i, _, label in places],
        "primary_keys": [numbers[t.name, t.key[0]] for t in schema.tables if len(t.key) == 1],
        "foreign_keys": [(numbers[a, b], numbers[c, d]) for a, b, c, d in schema.references],
    }


def _listed(schema: SchemaView) -> str:
    """Return one line for each table with its columns and references."""
    refers = {(table, column): to_table for table, column, to_table, _ in schema.references}
    lines = []
    for table in schema.tables:
        columns = ", ".join(
            f"{name} -> {refers[table.name, name]}" if (table.name, name) in refers else name
            for name, _, _ in table.columns
        )
        lines.append(f"{table.name}({columns})")
    return "\n".join(lines)


def refusal(error: QueryRefused, style: Style) -> str:
    """Return the observation after an error; AgentGym's has no prefix."""
    return str(error) if style is Style.AGENTGYM else f"Error: {error}"


def state(answer: list[Row] | str) -> str:
    """Return the start of the rows, or of the error text."""
    # Only the first rows can appear, and there may be many.
    text = answer if isinstance(answer, str) else str(answer[: MAX_STATE_CHARS + 1])
    return text if len(text) <= MAX_STATE_CHARS else f"{text[:MAX_STATE_CHARS]}..."
