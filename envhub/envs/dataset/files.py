"""Reads the records of a dataset: JSON, JSONL, CSV, and what the package `datasets` reads.

The text formats are read here, since an error names the line and the values stay as written: Arrow
would give the records of a file equal columns and types. Parquet, Arrow, saved datasets and names
of the Hugging Face Hub need the package `datasets`.
"""

import csv
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from common.errors import ConfigError
from common.user_code import find_path

Record = dict[str, Any]
GZIP = ".gz"
HASH_BYTES = 1 << 20
MAX_FIELD_CHARS = 1 << 30  # Longest field of a CSV file.
ENTRIES = "dataset_info.json"  # A file of each split that `datasets.save_to_disk` wrote.
SPLITS = "dataset_dict.json"  # A file of a folder with several such splits.
HUB_NAME = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(:(?P<one>[\w.-]+))?(:(?P<two>[\w.-]+))?"
)
COMMIT = re.compile(r"[0-9a-f]{7,40}")


def find_data(key: str, value: str) -> Path:
    """Return the path of a dataset, or its name on the Hub, see `HUB_NAME`.

    Raises: ConfigError: there is no such path, and it is no name of the Hub.
    """
    try:
        return find_path(key, value)
    except ConfigError:
        if not HUB_NAME.fullmatch(value) or suffix_of(Path(value)) in READERS:
            raise
        return Path(value)


def read_records(key: str, path: Path, split: str) -> list[Record]:
    """Return the records of a file, or of a split of a folder.

    Args:
        key: the setting that named `path`, for error messages.

    Raises: ConfigError: the format is unknown, a record is malformed, or a package is missing.
    """
    where = f"{key}={path}"
    files = files_of(key, path, split)
    try:
        records = [record for file in files for record in _read(key, file)]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(f"{where}: cannot be read as UTF-8 text: {error}") from error
    if not records:
        raise ConfigError(f"{where}: the file has no records")
    return records


def files_of(key: str, path: Path, split: str) -> list[Path]:
    """Return the data files of a path, in the order of their names. Raises: ConfigError."""
    if path.is_file():
        return [path]
    where = f"{key}={path}"
    if not path.exists():
        return _hub_files(where, str(path), split)
    if (path / SPLITS).is_file():
        names = json.loads((path / SPLITS).read_text(encoding="utf-8"))["splits"]
        if split not in names:
            raise ConfigError(f"{where}: no split {split!r}; the splits are {', '.join(names)}")
        path = path / split
    if (path / ENTRIES).is_file() and (path / "state.json").is_file():
        return _saved_files(where, path)
    files = sorted(file for file in path.rglob("*") if suffix_of(file) in READERS)
    if not files:
        formats = ", ".join(READERS)
        raise ConfigError(f"{where}: the folder has no file of a known format ({formats})")
    of_split = [file for file in files if _is_of(split, file.relative_to(path))]
    is_named = any(_is_of(name, file.relative_to(path)) for name in NAMED for file in files)
    if not of_split and is_named:
        names = ", ".join(str(file.relative_to(path)) for file in files[:5])
        raise ConfigError(
            f"{where}: no file of the split {split!r}; the files are {names}. Set data.train_split,"
            " data.validation_split and data.eval_split, or name files"
        )
    _check_parts(where, split, [file.relative_to(path) for file in of_split])
    return of_split or files


def _check_parts(where: str, split: str, files: list[Path]) -> None:
    """Check that a folder has one part with the split. Raises: ConfigError: it has several.

    Example: gsm8k has main/train-0.parquet and socratic/train-0.parquet, the same questions twice.
    """
    parts: dict[Path, None] = {}
    for file in files:
        depth = next(i for i, part in enumerate(file.parts) if _is_named(split, part))
        parts[Path(*file.parts[:depth])] = None
    if len(parts) > 1:
        names = ", ".join(map(str, parts))
        first = next(part for part in parts if part.parts)
        raise ConfigError(
            f"{where}: several folders have the split {split!r}: {names}; name one of them, such as"
            f" {where}/{first}"
        )


def has_split(key: str, path: Path, split: str) -> bool:
    """Return whether a dataset has a split of this name. Raises: ConfigError: see `files_of`."""
    if path.is_file():
        return False
    if not path.exists():
        return split in _hub_splits(f"{key}={path}", str(path))
    if (path / SPLITS).is_file():
        return split in json.loads((path / SPLITS).read_text(encoding="utf-8"))["splits"]
    files = [file for file in path.rglob("*") if suffix_of(file) in READERS]
    return any(_is_of(split, file.relative_to(path)) for file in files)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A dataset of the Hub: `owner/name[@revision][:configuration][:split]`."""

    repository: str
    revision: str | None
    configuration: str | None
    split: str | None  # None: the split of the settings.


@cache
def hub_name(where: str, value: str) -> HubName:
    """Return the parts of a name of the Hub. A single part is a configuration, or else a split.

    Raises: ConfigError: the dataset has no such part, or it cannot be read.
    """
    match = HUB_NAME.fullmatch(value)
    assert match is not None
    repository = match["repository"]
    revision = match["revision"]
    one = match["one"]
    two = match["two"]
    name = HubName(repository=repository, revision=revision, configuration=one, split=two)
    if one is None or two is not None:
        return name
    try:
        _split_names(where, name)
    except ConfigError as error:
        whole = HubName(repository=repository, revision=revision, configuration=None, split=one)
        try:
            splits = _split_names(where, whole)
        except ConfigError:
            raise error from None
        if one not in splits:
            raise ConfigError(
                f"{where}: {one!r} is no configuration and no split of {repository}; the splits"
                f" are {', '.join(splits)}"
            ) from error
        return whole
    return name


def own_split(key: str, value: str) -> str | None:
    """Return the split in a name of the Hub; None for paths, and for names without one.

    Raises: ConfigError: the dataset has no such part, or it cannot be read.
    """
    if not value or Path(value).exists() or not HUB_NAME.fullmatch(value):
        return None
    path = find_data(key, value)
    return None if path.exists() else hub_name(f"{key}={value}", value).split


def _split_names(where: str, name: HubName) -> list[str]:
    """Return the splits of a dataset of the Hub. Raises: ConfigError."""
    return _by_datasets(
        where,
        "get_dataset_split_names",
        name.repository,
        name.configuration,
        revision=name.revision,
    )


@cache
def _hub_splits(where: str, value: str) -> list[str]:
    """Return the splits that a name of the Hub offers beside its own. Raises: ConfigError."""
    name = hub_name(where, value)
    return [each for each in _split_names(where, name) if each != name.split]


@cache
def _hub_files(where: str, value: str, split: str) -> list[Path]:
    """Return the Arrow files of a split of the Hub, downloaded once. Raises: ConfigError."""
    name = hub_name(where, value)
    dataset = _by_datasets(
        where,
        "load_dataset",
        name.repository,
        name.configuration,
        split=split,
        revision=name.revision,
    )
    files = [Path(file["filename"]) for file in dataset.cache_files]
    _check_revision(where, name, files)
    return files


def _check_revision(where: str, name: HubName, files: list[Path]) -> None:
    """Check that the cache did not give another revision. Raises: ConfigError.

    Without the network, `datasets` takes the newest cached revision, whatever was asked for.
    """
    commit = commit_of(files)
    if name.revision is None or commit.startswith(name.revision):
        return
    if COMMIT.fullmatch(name.revision) or import_module("datasets").config.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{where}: the cache of datasets has the revision {commit}, not {name.revision}; load"
            " it once with the network, or name the cached revision"
        )


def commit_of(files: list[Path]) -> str:
    """Return the commit of a dataset of the Hub, which names the folder of its cached files."""
    return files[0].parent.name if files else ""


# Usual names of splits.
OF_TRAINING = ("train", "training", "trainset")
OF_VALIDATION = ("validation", "valid", "val", "dev")
OF_TEST = ("test", "testing", "testset", "eval", "evaluation")
NAMED = OF_TRAINING + OF_VALIDATION + OF_TEST


def _is_of(split: str, path: Path) -> bool:
    """Return whether a file belongs to a split by its first word that names a split.

    Example: train-00000-of-2.parquet, gsm8k_train.jsonl and train/test_cases.jsonl are of `train`.
    """
    first = next(filter(None, (_named(split, part) for part in path.parts)), None)
    return first == split.lower()


def _is_named(split: str, part: str) -> bool:
    """Return whether a file or a folder is named after a split."""
    return _named(split, part) == split.lower()


def _named(split: str, part: str) -> str | None:
    """Return the first word of a name that is `split` or a usual name of one; None for none."""
    words = "|".join(sorted({re.escape(split.lower()), *NAMED}, key=len, reverse=True))
    match = re.search(rf"(?<![a-z])(?:{words})(?![a-z])", part.lower())
    return None if match is None else match[0]


def _saved_files(where: str, folder: Path) -> list[Path]:
    """Return the Arrow files of a split that `datasets.save_to_disk` wrote. Raises: ConfigError."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_files"):
        raise ConfigError(
            f"{where}: the folder holds an index beside its records; write it again with"
            " dataset.flatten_indices().save_to_disk(...)"
        )
    return [folder / file["filename"] for file in state["_data_files"]]


def digest_of(files: list[Path]) -> str:
    """Return the sha256 of the files' bytes."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while part := file.read(HASH_BYTES):
                digest.update(part)
    return digest.hexdigest()


def _read(key: str, path: Path) -> Iterator[Record]:
    """Return the records of a file, by its suffix. Raises: ConfigError: the format is unknown."""
    suffix = suffix_of(path)
    reader = READERS.get(suffix)
    if reader is None:
        formats = ", ".join(READERS)
        raise ConfigError(f"{key}={path}: the format {suffix!r} is unknown; known are {formats}")
    return reader(f"{key}={path}", path)


def suffix_of(path: Path) -> str:
    """Return the suffix that names the format: that before `.gz` of a compressed text."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix == GZIP and READERS.get(inner) in TEXTS else suffix


def _open_text(path: Path, *, newline: str | None = None) -> TextIO:
    """Return an open text file, decompressed if its name ends with `.gz`."""
    if path.suffix.lower() == GZIP:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _read_lines(where: str, path: Path) -> Iterator[Record]:
    """Yield the records of JSON lines, or of one JSON list of objects."""
    with _open_text(path) as file:
        begin = file.read(1)
        while begin.isspace():
            begin = file.read(1)
        if begin == "[":
            records = _list_in(begin + file.read())
            if records is not None:
                yield from _objects(where, records)
                return
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _checked(f"{where} line {number}", line)


def _list_in(text: str) -> list[Any] | None:
    """Return a JSON list that begins with an object; None if the text is none."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, list) and parsed and isinstance(parsed[0], dict) else None


def _objects(where: str, records: list[Any]) -> Iterator[Record]:
    """Yield the records of a list. Raises: ConfigError: one is no object."""
    for number, record in enumerate(records, 1):
        yield _object(f"{where} record {number}", record)


def _checked(place: str, text: str) -> Record:
    """Return a JSON object. Raises: ConfigError: the text is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    return _object(place, record)


def _object(place: str, record: Any) -> Record:
    """Return a record. Raises: ConfigError: it is no object."""
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: the record is {type(record).__name__}, not an object")
    return record


def _read_json(where: str, path: Path) -> Iterator[Record]:
    """Yield the records of a JSON list, or of JSON lines."""
    with _open_text(path) as file:
        text = file.read()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _begins_with_record(text):
            yield from _read_lines(where, path)
            return
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if isinstance(parsed, dict):  # One list under any name, as in {"data": [...]}.
        lists = {name: each for name, each in parsed.items() if isinstance(each, list)}
        if len(lists) == 1:
            ((name, listed),) = lists.items()
            if _is_column(parsed, listed):
                raise ConfigError(
                    f"{where}: the file is one record with the column {name!r}; write a list of"
                    " records, or one record in each line of a .jsonl file"
                )
            parsed = listed
    if not isinstance(parsed, list):
        raise ConfigError(
            f"{where}: expects a list of objects, an object with one such list, or one object in"
            " each line"
        )
    yield from _objects(where, parsed)


def _is_column(record: Record, listed: list[Any]) -> bool:
    """Return whether a list of an object is a column, such as messages, and no list of records."""
    objects = [each for each in listed if isinstance(each, dict)]
    return any("role" in each or not record.keys().isdisjoint(each) for each in objects)


def _begins_with_record(text: str) -> bool:
    """Return whether the first line of a text is a JSON object, as in JSON lines."""
    line, _, others = text.lstrip().partition("\n")
    try:
        return bool(others.strip()) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_table(where: str, path: Path) -> Iterator[Record]:
    """Yield the records of a CSV or TSV file with a header."""
    csv.field_size_limit(MAX_FIELD_CHARS)
    separator = "\t" if suffix_of(path) == ".tsv" else ","
    with _open_text(path, newline="") as file:
        rows = csv.DictReader(file, delimiter=separator, strict=True)
        try:
            names = list(rows.fieldnames or [])
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{where}: the first line has the column {twice!r} twice")
            for row in rows:
                if None in row or None in row.values():
                    have = len(rows.fieldnames or [])
                    raise ConfigError(
                        f"{where} line {rows.line_num}: the row has not the {have} fields of the"
                        " first line"
                    )
                yield dict(row)
        except csv.Error as error:
            raise ConfigError(f"{where} line {rows.line_num}: not CSV: {error}") from error


def _read_arrow(where: str, path: Path) -> Iterator[Record]:
    """Yield the records of a Parquet file, or of a file with an Arrow stream."""
    reader = "from_parquet" if suffix_of(path) == ".parquet" else "from_file"
    records = _by_datasets(where, f"Dataset.{reader}", str(path)).to_list()
    yield from map(_without_added_nulls, records)


# Objects whose fields differ between records: schemas of tools, calls, and their arguments.
VARIED = ("tool_calls", "parameters", "input_schema", "inputSchema", "arguments")


def _without_added_nulls(value: Any, *, is_varied: bool = False) -> Any:
    """Return a value without the nulls that Arrow adds to tools and calls.

    Arrow gives all objects of a column the same fields, so a tool would have the arguments of all
    others as nulls.
    """
    if isinstance(value, list):
        return [_without_added_nulls(each, is_varied=is_varied) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_added_nulls(each, is_varied=is_varied or name in VARIED)
        for name, each in value.items()
        if each is not None or not is_varied
    }


def _by_datasets(where: str, function: str, *arguments: Any, **options: Any) -> Any:
    """Return what a function of the package `datasets` returns.

    Raises: ConfigError: the package is not installed, or it cannot read the data.
    """
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{where}: no such file or folder, or a format that needs the package datasets. Install"
            " it with: pip install datasets==5.2.0 pyarrow==26.0.1 (the extra `data`)"
        )
    datasets = import_module("datasets")
    datasets.disable_progress_bars()
    # Errors of pyarrow have the first two base classes.
    errors = (OSError, ValueError, datasets.exceptions.DatasetsError)
    try:
        return attrgetter(function)(datasets)(*arguments, **options)
    except errors as error:
        reason = error.__cause__ or error
        raise ConfigError(f"{where}: cannot be read by datasets: {reason}") from error


READERS: dict[str, Callable[[str, Path], Iterator[Record]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}
TEXTS = (_read_lines, _read_json, _read_table)
