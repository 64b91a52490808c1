"""An AgentGym server, theirs or ours, behind one raw client; normalises varying texts."""

import hashlib
import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from envhub.agentgym.dialects import DIALECTS, Dialect, ResetReply

TIMEOUT_S = 120.0
MAX_IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Told:
    """One answer: the text, what is paid (`score` where the dialect has one), whether it is over.

    An answer with `fault` is that of a request that was refused.
    """

    text: str
    reward: float = 0.0
    score: float = 0.0
    done: bool = False
    fault: bool = False


class Raw:
    """One instance on one connection that is kept."""

    def __init__(self, name: str, url: str, token: str = "") -> None:
        self._dialect = DIALECTS[name]
        parts = urlsplit(url)
        self._base = parts.path.rstrip("/")
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
        self._asked_s = 0.0
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = self._dialect.create_body
        created = self._ask("POST", "create", None if body is None else dict(body))
        key = self._dialect.instance_key
        self._number = created if self._dialect.is_create_bare else created[key]

    def _ask(self, method: str, verb: str, body: dict[str, Any] | None) -> Any:
        if time.monotonic() - self._asked_s > MAX_IDLE_S:  # the server may have closed it
            self._connection.close()
        content = b"" if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if content else {})
        self._connection.request(method, f"{self._base}/{verb}", content, headers)
        answer = self._connection.getresponse()
        told = answer.read()
        self._asked_s = time.monotonic()
        if answer.status != 200:
            return {"error": f"{answer.status} {told[:200]!r}"}
        return json.loads(told)

    def _named(self, **more: Any) -> dict[str, Any]:
        return {self._dialect.instance_key: self._number, **more}

    def reset(self, index: int) -> Told:
        """Begin an item; return the first observation, without what clients put before it."""
        dialect = self._dialect
        extra = dict(dialect.reset_extra)
        reply = self._ask("POST", "reset", self._named(**{dialect.item_key: index}, **extra))
        if isinstance(reply, dict) and "error" in reply:
            return Told(str(reply["error"]), fault=True)
        if dialect.reset_reply is ResetReply.LIST:
            return Told(reply[0])
        if dialect.reset_reply is ResetReply.TEXT:
            return Told(str(reply))
        text = reply["observation"]
        if "task_description" in reply:
            text = f"{reply['task_description']}\n{text}"
        return Told(text, score=float(reply.get("score", 0)), done=bool(reply.get("done", False)))

    def step(self, action: str) -> Told:
        """Take an action as a client sends it."""
        reply = self._ask("POST", "step", self._named(action=action))
        if "error" in reply:
            return Told(str(reply["error"]), fault=True)
        dialect: Dialect = self._dialect
        return Told(
            reply[dialect.observation_key],
            reward=float(reply["reward"]),
            score=float(reply.get(dialect.score_key, 0)),
            done=bool(reply[dialect.done_key]),
        )

    def close(self) -> None:
        """Give the instance back, where there is a way."""
        if self._dialect.has_close:
            self._ask("POST", "close", self._named())
        self._connection.close()


def settled(name: str, text: str, *, is_first: bool) -> str:
    """Return what of a text the original itself does not vary.

    TextCraft's commands at a reset are drawn, and ordered, by the hashes of one process
    (PYTHONHASHSEED): what remains is the goal. ScienceWorld lists objects by their places in
    memory, other ones with every load: what remains are its words.
    """
    if name == "textcraft" and is_first:
        return text.rpartition("Goal:")[2]
    if name == "sciworld":
        return " ".join(sorted(text.replace(",", " ").replace(".", " ").split()))
    return text


def digest(text: str) -> str:
    """Return a text's mark in a transcript."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
