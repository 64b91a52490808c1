"""Conversation files in the AgentTraj format, as a source of episodes like a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from tools.dashboard.reading.query import page
from tools.dashboard.reading.rows import FLOATS, INTS, NAMES, EpisodeRows
from tools.exchange.agent_traj import Conversation, read_conversations


class ConversationFile:
    """One file. It is read whole on the first refresh, and again after each change."""

    kind = "conversations"

    def __init__(self, path: Path, *, name: str) -> None:
        self.name = name
        self.path = path
        self.rows = EpisodeRows()
        self.problems: list[str] = []
        self._conversations: list[Conversation] = []
        self._read_at: tuple[int, int] | None = None

    def refresh(self, *, budget_s: float = 0.0) -> bool:
        """Read the file if it is new or changed. Returns False: nothing is left to read."""
        try:
            found = self.path.stat()
        except OSError as error:
            self.problems = [f"{self.path}: {error.strerror}"]
            return False
        if self._read_at == (found.st_mtime_ns, found.st_size):
            return False
        self._read_at = (found.st_mtime_ns, found.st_size)
        self.rows = EpisodeRows()
        self.problems = []
        try:
            self._conversations = read_conversations(self.path)
        except ConfigError as error:
            self._conversations = []
            self.problems = [f"not a conversation file: {error}"]
        for number, each in enumerate(self._conversations):
            self.rows.add(str(number), _values(number, each))
        return False

    def summary(self) -> dict[str, Any]:
        """Return the entry of this file in the list of sources."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": f"{self.rows.num} conversations",
            "episodes": self.rows.num,
            "indexed": 1.0,
            "problems": self.problems,
        }

    def page(self, wanted: Mapping[str, str], *, start: int, num: int) -> dict[str, Any]:
        """Return one page of the conversations that match the filters."""
        return page(self.rows, wanted, start=start, num=num)

    def episode(self, episode_id: str) -> dict[str, Any]:
        """Return one conversation; each message is one segment with one text. Raises: KeyError."""
        row = self.rows.row_of[episode_id]
        segments: list[dict[str, Any]] = []
        turn = 0
        for i, message in enumerate(self._conversations[row].messages):
            kind = "action" if message.is_agent else "observation" if i else "prompt"
            segments.append({"kind": kind, "turn": turn, "start": i, "texts": [message.text]})
            if message.is_agent:
                segments[-1] |= {"logprobs": [0.0], "versions": [], "invalid": False, "score": None}
                turn += 1
        return {**self.rows.get(row), "segments": segments, "advantage": None, "problems": []}


def _values(number: int, conversation: Conversation) -> dict[str, Any]:
    """Return the columns of a conversation as a row of the index."""
    values: dict[str, Any] = dict.fromkeys(INTS, 0) | dict.fromkeys(FLOATS, 0.0)
    values |= dict.fromkeys(NAMES, "")
    env = conversation.item_id.rpartition("_")[0] or conversation.item_id
    num_turns = sum(message.is_agent for message in conversation.messages)
    return values | {
        **{"offset": number, "turns": num_turns, "reward": conversation.reward},
        **{"success": int(conversation.reward >= 1.0), "env": env, "item": conversation.item_id},
        **{"kind": "conversation", "trained_at": -1},
    }
