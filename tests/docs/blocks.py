"""The fenced blocks of the documentation, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.repository import ROOT

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
INLINE = re.compile(r"`(python run\.py [^`]+)`")
FENCE = re.compile(r"^\s*```(\w*)\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or one command in the prose."""

    page: Path
    line: int  # of its first line, from 1
    language: str  # "" if none is given
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page. Raises: ValueError: one is never closed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    language = ""
    for number, line in enumerate(lines):
        if (fence := FENCE.match(line)) is None:
            continue
        if start is None:
            start, language = number + 1, fence[1]
        else:
            yield Block(page, start + 1, language, "\n".join(lines[start:number]))
            start = None
    if start is not None:
        raise ValueError(f"{page}: the block of line {start} is never closed")


def inline_of(page: Path) -> Iterator[Block]:
    """Yield the commands in the prose of a page."""
    is_fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_fenced ^= FENCE.match(line) is not None
        if not is_fenced:
            yield from (Block(page, number, "sh", found) for found in INLINE.findall(line))


def commands_of(block: Block) -> list[str]:
    """Return the commands of a block of `sh`, without comments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    lines = (shlex.join(shlex.split(line, comments=True)) for line in text.splitlines())
    return [line for line in lines if line]
