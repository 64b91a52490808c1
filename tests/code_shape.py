"""Prints the shape of the code: largest files, files with one reader, the two ways of the data.

`make check` runs it as `python -m tests.code_shape`. It never fails by a number.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common.repository import ROOT
from tests.syntax_trees import text_of
from tests.test_architecture import PRODUCT, SOURCES, graph_of

LARGEST = 10
WAYS = ("The way of an item through a run", "The way of a version through a run")


def files_of_way(title: str) -> Iterator[str]:
    """Yield the files that a table of docs/ARCHITECTURE.md names, without repetition.

    A cell names a file by its path, or below the folder of an earlier file of the cell.
    """
    page = text_of(ROOT / "docs" / "ARCHITECTURE.md")
    table = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    yielded: set[str] = set()
    for cell in re.findall(r"\| ([^|]*\.py`[^|]*) \|$", table, re.MULTILINE):
        folder = Path()
        for name in re.findall(r"`([\w/]+\.py)`", cell):
            places = [ROOT / name, *(ROOT / parent / name for parent in folder.parents)]
            path = next((place for place in places if place.is_file()), None)
            assert path is not None, f"docs/ARCHITECTURE.md: {name} is no file"
            folder = path.relative_to(ROOT)
            if path.as_posix() not in yielded:
                yielded.add(path.as_posix())
                yield path.relative_to(ROOT).as_posix()


def lines() -> Iterator[str]:
    """Yield the lines of the report."""
    files = [path for path in PRODUCT if path.name != "__init__.py"]
    length = {path: text_of(path).count("\n") for path in files}
    yield f"product: {len(files)} files, {sum(length.values()):,} lines"
    for path, count in sorted(length.items(), key=lambda item: -item[1])[:LARGEST]:
        yield f"  {count:5} {path.relative_to(ROOT)}"
    graph = graph_of(SOURCES)
    readers = Counter(name for imported in graph.values() for name in imported)
    beside = [
        f"{name} <- {reader}"
        for reader, imported in graph.items()
        for name in imported
        if readers[name] == 1 and name.rpartition(".")[0] == reader.rpartition(".")[0]
    ]
    yield f"modules with one importer, which lies in their folder: {len(beside)}"
    for title in WAYS:
        way = list(files_of_way(title))
        yield f"{title}: {len(way)} files"


if __name__ == "__main__":
    for line in lines():
        print(line)  # noqa: T201 - the report of a command
