"""Answers and numbers of a judge, shared by the processes of a run and kept after their end."""

import hashlib
import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_ANSWERS = 100_000  # Older answers are removed.
ANSWERS_PER_CHECK = 1_000
BUSY_S = 30.0  # Seconds for which a statement waits for other processes.
SCHEMA = """
create table if not exists answers (key text primary key, answer text, tokens_in int,
    tokens_out int);
create table if not exists totals (name text primary key, num int) without rowid;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text of a judge, with the number of tokens that it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


def key_of(request: Any) -> str:
    """Return the key of a request: a digest of its whole content."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class JudgeStore:
    """A SQLite file with the answers by their request, and with totals. Threads may share it."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or a store in memory without one."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        place = ":memory:" if path is None else str(path)
        self._lock = threading.Lock()
        self._num_kept = 0
        self._base = sqlite3.connect(
            place, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._base.execute("pragma journal_mode=wal")
        self._base.execute("pragma synchronous=normal")
        self._base.executescript(SCHEMA)

    def find(self, key: str) -> Answer | None:
        """Return a kept answer; None: there is none."""
        rows = self._run("select answer, tokens_in, tokens_out from answers where key=?", key)
        if not rows:
            return None
        text, tokens_in, tokens_out = rows[0]
        return Answer(text=text, prompt_tokens=tokens_in, completion_tokens=tokens_out)

    def keep(self, key: str, answer: Answer) -> None:
        """Keep an answer; remove the oldest ones beyond `MAX_ANSWERS` from time to time."""
        values = (key, answer.text, answer.prompt_tokens, answer.completion_tokens)
        self._run("insert or replace into answers values (?, ?, ?, ?)", *values)
        self._num_kept += 1
        if self._num_kept % ANSWERS_PER_CHECK == 0:
            self.prune(MAX_ANSWERS)

    def prune(self, num: int) -> None:
        """Remove all answers but the `num` newest ones."""
        newest = "select max(rowid) from answers"
        self._run(f"delete from answers where rowid <= ({newest}) - ?", num)

    def total(self, name: str) -> int:
        """Return a total, 0 for a new one."""
        rows = self._run("select num from totals where name=?", name)
        return int(rows[0][0]) if rows else 0

    def add(self, name: str, num: int = 1, *, most: int = 0) -> bool:
        """Add to a total, unless it would exceed `most` (0: no limit); return whether it did."""
        rows = self._run(
            "insert into totals values (?1, ?2) on conflict (name) do update set num=num+?2"
            " where ?3=0 or num+?2<=?3 returning num",
            name,
            num,
            most,
        )
        return bool(rows)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()

    def _run(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a statement. Threads take turns."""
        with self._lock, closing(self._base.execute(statement, values)) as cursor:
            return cursor.fetchall()
