"""Problems from a folder in BIRD's format."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.text import is_file_name
from envhub.env import EnvFailure, ItemId, SubsetSpec
from envhub.envs.sqlgym.problems import Problem, SchemaView, TableView
from envhub.envs.sqlgym.query import open_file

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
