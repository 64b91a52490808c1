"""Text to SQL: one statement answers a question about a database.

The problems are generated, or come from a folder in BIRD's format.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.config.envs import EnvsSection, SqlgymOptions
from common.text import counted, is_file_name
from envhub.digests import digest_of_files, digest_of_sizes
from envhub.env import (
    EnvFailure,
    EnvSpec,
    Isolation,
    ItemId,
    StepResult,
    Style,
    SubsetSpec,
    UnknownItem,
    action_text,
    parse_item,
)
from envhub.envs.sqlgym import generated
from envhub.envs.sqlgym.problems import Problem, SchemaView, TableView, numbered
from envhub.envs.sqlgym.query import (
    MAX_RESULT_BYTES,
    Database,
    LimitReached,
    NoTable,
    QueryRefused,
    Row,
    StatementLimits,
    open_file,
    rows_of,
    size_of,
)
from envhub.envs.text_env import TextEnv
from envhub.tasks import spec_beside

SUBSET = "bird"
FOLDERS = {"train": "train", "test": "dev"}  # BIRD's own test set is not public.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One split of BIRD: its questions, schemas and databases."""

    questions: list[dict]
    schemas: dict[str, SchemaView]
    databases: Path


class Bird:
    """The questions of BIRD's `train` and `dev`. AgentGym numbers `train` first, then `dev`."""

    def __init__(self, folder: Path) -> None:
        """Read the questions and designs; the episodes open the databases.

        Raises: OSError, ValueError, KeyError: the folder is not in BIRD's format.
        """
        self._parts = {split: _read(folder, name) for split, name in FOLDERS.items()}
        self.subsets = {
            SUBSET: SubsetSpec(
                num_train=len(self._parts["train"].questions),
                num_test=len(self._parts["test"].questions),
                max_turns=1,
            )
        }

    def problem(self, item: ItemId) -> Problem:
        """Return the problem of an item of `subsets`."""
        part = self._parts[item.split]
        row = part.questions[item.index]
        name = row["db_id"]
        if name not in part.schemas:
            raise EnvFailure(f"BIRD's {FOLDERS[item.split]}_tables.json lacks database {name!r}")
        if not is_file_name(name):
            raise EnvFailure(f"BIRD's question names the database {name!r}, which is a path")
        path = part.databases / name / f"{name}.sqlite"
        if not path.is_file():
            raise EnvFailure(f"BIRD's database {path.name} is missing")
        return Problem(
            schema=part.schemas[name],
            question=row["question"],
            evidence=row.get("evidence") or "",
            gold=row["SQL"],
            open=partial(open_file, path),
        )


def files_of(folder: Path) -> list[Path]:
    """Return the required files and folders of BIRD's folder."""
    return [
        folder / name / part
        for name in FOLDERS.values()
        for part in (f"{name}.json", f"{name}_tables.json", f"{name}_databases")
    ]


def _read(folder: Path, name: str) -> _Part:
    """Return one split of BIRD's folder."""
    questions_file, tables_file, databases = (
        path for path in files_of(folder) if path.parent.name == name
    )
    designs = json.loads(tables_file.read_text(encoding="utf-8"))
    return _Part(
        questions=json.loads(questions_file.read_text(encoding="utf-8")),
        schemas={design["db_id"]: _view(design) for design in designs},
        databases=databases,
    )


def _view(design: dict) -> SchemaView:
    """Return the view of a design in tables.json, which numbers the columns of all tables."""
    names = design["table_names_original"]
    columns = design["column_names_original"]  # [[table number, name]]; the number -1 is "*".
    labels = design["column_names"]
    types = design["column_types"]
    keys = {
        number
        for entry in design["primary_keys"]
        for number in (entry if isinstance(entry, list) else [entry])
    }
    tables = []
    for i, table in enumerate(names):
        mine = [n for n, (of_table, _) in enumerate(columns) if of_table == i]
        tables.append(
            TableView(
                name=table,
                columns=tuple((columns[n][1], types[n], labels[n][1]) for n in mine),
                key=tuple(columns[n][1] for n in mine if n in keys),
            )
        )
    references = tuple(
        (names[columns[a][0]], columns[a][1], names[columns[b][0]], columns[b][1])
        for a, b in design["foreign_keys"]
    )
    return SchemaView(
        name=design["db_id"], tables=tuple(tables), references=references, design=design
    )


MAX_STATE_CHARS = 100
FENCE = "```"


def statement_of(text: str, style: Style) -> str:
    """Return the statement in an answer: the last sql block, or all text before a fence."""
    _, fence, after = text.rpartition(f"{FENCE}sql")
    if fence:
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


def refusal_text(error: QueryRefused, style: Style) -> str:
    """Return the observation after an error; AgentGym's has no prefix."""
    return str(error) if style is Style.AGENTGYM else f"Error: {error}"


def answer_text(answer: list[Row] | str) -> str:
    """Return the start of the rows, or of the error text."""
    # Only the first rows can appear, and there may be many.
    text = answer if isinstance(answer, str) else str(answer[: MAX_STATE_CHARS + 1])
    return text if len(text) <= MAX_STATE_CHARS else f"{text[:MAX_STATE_CHARS]}..."


SESSIONS_PER_WORKER = 64
MAX_WORKERS = 2
NUM_BIRD_TRAIN = 9428
MAX_GOLD_ROWS = 1_000_000
# Time beyond the queries: opening files, and waiting for a core among other sessions.
OVERHEAD_S = 20.0


class Problems:
    """All offered problems, with the limits of a statement."""

    def __init__(self, options: SqlgymOptions) -> None:
        self.options = options
        self._bird = Bird(Path(options.bird_dir)) if options.bird_dir else None
        self._numbered = self._bird.subsets if self._bird else generated.SUBSETS
        self.subsets: Mapping[str, SubsetSpec] = {**self._numbered, **generated.SUBSETS}

    def problem(self, item: ItemId) -> Problem:
        """Return an item's problem."""
        if self._bird is not None and item.subset in self._bird.subsets:
            return self._bird.problem(item)
        return generated.problem_of(item)

    def from_agentgym(self, index: int) -> str:
        """Return the item of AgentGym's index into BIRD, or else into the generated problems.

        Training items precede test items. In BIRD, 0 to 9427 are `train` and 9428 to 10961 are
        `dev`, even if the folder has fewer.

        Raises: UnknownItem: there is no such item here.
        """
        if self._bird is None:
            return numbered(self._numbered, index)
        split, place = (
            ("train", index) if index < NUM_BIRD_TRAIN else ("test", index - NUM_BIRD_TRAIN)
        )
        [(subset, spec)] = self._bird.subsets.items()
        num_items = spec.num_train if split == "train" else spec.num_test
        if not 0 <= place < num_items:
            has = counted(num_items, f"{split} item")
            raise UnknownItem(f"no data index {index}: the folder has {has}")
        return f"{subset}-{split}-{place}"


class SqlEnv(TextEnv):
    """One question with one statement: the first step always ends the episode.

    The reward is 1 if the statement's rows, as a set, equal those of the gold statement. A date
    computed from "now" is that of the machine.
    """

    def __init__(self, style: Style, problems: Problems) -> None:
        super().__init__(style)
        self._problems = problems
        self._connection: Database | None = None

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines everything."""
        item = parse_item(item_id, self._problems.subsets)
        self.close()
        try:
            self._problem = problem = self._problems.problem(item)
            self._connection = problem.open()
        except (sqlite3.Error, MemoryError) as error:
            reason = str(error) or "out of memory"
            raise EnvFailure(f"{item_id}: its database cannot be read: {reason}") from error
        self._begin()
        return first_observation(problem, self._style)

    def _step(self, action: str) -> StepResult:
        """Run the statement, and compare its rows with the gold rows."""
        connection = self._connection
        assert connection is not None, "a step without a reset"
        gold = self._gold_rows(connection)
        options = self._problems.options
        # A result as large as the gold answer is always allowed.
        limits = StatementLimits(
            timeout_s=options.query_timeout_s,
            max_rows=max(options.max_rows, len(gold or ())),
            max_bytes=max(MAX_RESULT_BYTES, 2 * size_of(gold or ())),
        )
        answer: list[Row] | str
        try:
            statement = statement_of(action, self._style)
            answer = rows_of(connection, statement, limits, is_last=True)
        except NoTable as error:  # AgentGym counts this as an empty result.
            is_agentgyms = self._style is Style.AGENTGYM
            answer = [] if is_agentgyms else refusal_text(error, self._style)
        except QueryRefused as error:
            answer = refusal_text(error, self._style)
        self.close()
        is_right = not isinstance(answer, str) and gold is not None and set(answer) == set(gold)
        return StepResult(
            observation=answer_text(answer),
            reward=1.0 if is_right else 0.0,
            done=True,
            is_valid=not isinstance(answer, str),
        )

    def _gold_rows(self, connection: Database) -> list[Row] | None:
        """Return the gold statement's rows; None if the gold statement itself is wrong.

        Raises: EnvFailure: it exceeds its limits.
        """
        limits = StatementLimits(
            timeout_s=self._problems.options.gold_timeout_s, max_rows=MAX_GOLD_ROWS
        )
        try:
            return rows_of(connection, self._problem.gold, limits)
        except LimitReached as error:
            raise EnvFailure(f"the gold statement failed: {error}") from error
        except QueryRefused:
            return None

    def _valid_actions(self) -> list[str]:
        """Return one statement per table, as a sample of executable statements."""
        return [
            fenced(f'SELECT COUNT(*) FROM "{table.name}"') for table in self._problem.schema.tables
        ]

    def _expert_action(self) -> str | None:
        return fenced(self._problem.gold)

    def render(self) -> str:
        """Return the problem with its gold statement."""
        asked = first_observation(self._problem, Style.COMPACT)
        return f"{asked}\ngold: {self._problem.gold}"

    def _state(self) -> str:
        problem = self._problem
        return repr((problem.schema, problem.question, problem.gold))

    def close(self) -> None:
        """Close the database."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._done = True


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the SQL environment's catalogue entry."""
    chosen = options.sqlgym
    problems = Problems(chosen)
    return spec_beside(
        __file__,
        problems.subsets,
        lambda style: SqlEnv(style, problems),
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        max_workers=MAX_WORKERS,
        step_timeout_s=chosen.gold_timeout_s + chosen.query_timeout_s + OVERHEAD_S,
        from_agentgym=problems.from_agentgym,
        content=content_of_bird(Path(chosen.bird_dir)) if chosen.bird_dir else {},
    )


def content_of_bird(folder: Path) -> dict[str, str]:
    """Return the digests of BIRD's folder. Its databases are compared by their sizes."""
    required = files_of(folder)
    files = [path for path in required if path.suffix == ".json"]
    databases = [
        path for each in required if each not in files for path in sorted(each.rglob("*.sqlite"))
    ]
    return {
        "envs.sqlgym.bird_dir": digest_of_files(folder, files),
        "databases of envs.sqlgym.bird_dir": digest_of_sizes(folder, databases),
    }


def check(options: EnvsSection) -> list[str]:
    """Return a line for each missing requirement of this machine, with its remedy."""
    missing = []
    if not hasattr(sqlite3.Connection, "deserialize"):
        missing.append("sqlgym needs a Python with sqlite 3.36 or newer (sqlite3 deserialize)")
    if options.sqlgym.bird_dir:
        missing += [
            f"envs.sqlgym.bird_dir: {path} is missing; unpack BIRD's train.zip and dev.zip there"
            for path in files_of(Path(options.sqlgym.bird_dir))
            if not path.exists()
        ]
    return missing
