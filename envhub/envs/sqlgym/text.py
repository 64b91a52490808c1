"""Wordings of the SQL environment, and how a statement is found in an answer."""

from envhub.env import Style, action_text
from envhub.envs.sqlgym.problems import Problem, SchemaView, TableView
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

    The evidence is told in the compact style only: AgentGym keeps it back.
    """
    if style is Style.AGENTGYM:
        return f"{_told(problem.schema)}\n\n{problem.question}"
    evidence = f"\nhint: {problem.evidence}" if problem.evidence else ""
    return f"{_listed(problem.schema)}\nquestion: {problem.question}{evidence}"


def _told(schema: SchemaView) -> str:
    tables = " ".join(_table_told(table) for table in schema.tables)
    references = " ".join(
        f"The column {column} of {table} refers to the column {to_column} of {to_table}."
        for table, column, to_table, to_column in schema.references
    )
    names = ", ".join(table.name for table in schema.tables)
    told = f"The database {schema.name} has the tables {names}. {tables} {references}"
    return told.strip()


def _table_told(table: TableView) -> str:
    columns = ", ".join(
        f"{name} ({kind})"
        if label in (name, name.replace("_", " "))
        else f"{name} ({kind}, {label})"
        for name, kind, label in table.columns
    )
    key = f" Its primary key is {', '.join(table.key)}." if table.key else ""
    return f"Table {table.name} has the columns {columns}.{key}"


def _listed(schema: SchemaView) -> str:
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
    """Return what the agent is told of an error; AgentGym tells it bare."""
    return str(error) if style is Style.AGENTGYM else f"Error: {error}"


def state(answer: list[Row] | str) -> str:
    """Return rows, or the text of an error, cut to their beginning."""
    # Only the first rows can show, and there may be many.
    text = answer if isinstance(answer, str) else str(answer[: MAX_STATE_CHARS + 1])
    return text if len(text) <= MAX_STATE_CHARS else f"{text[:MAX_STATE_CHARS]}..."
