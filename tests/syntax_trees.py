"""The parsed source files of the repository. The tests of the code's shape share them."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed file. A garbage collection while Python 3.11 parses can break it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text_of(path))
    finally:
        if was_enabled:
            gc.enable()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's tree."""
    return tuple(ast.walk(tree_of(path)))
