"""A policy to chat with from Python: the command `serve` with one checkpoint."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from common.errors import ConfigError, LongstrideError
from common.http.blocking import request
from tools.api.program import CommandProcess
from tools.api.references import NOTHING, Overrides, overrides_of
from tools.api.runs import Run

KEY = "LONGSTRIDE_POLICY_KEY"  # Variable with the key of the server.
SERVED = re.compile(r"^policy: (\S+) model=(\S+)$", re.MULTILINE)
CHAT_S = 600.0


class ChatFailed(LongstrideError):
    """The server of a policy refused a conversation; the text is its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """The policy's next message."""

    text: str
    thoughts: str  # Reasoning before the answer; "" if the chat template has none.
    tool_calls: list[dict[str, Any]]
    finish_reason: str  # "stop", "length" or "tool_calls".
    prompt_tokens: int
    sampled_tokens: int
    message: dict[str, Any] = field(repr=False)  # To be appended to the conversation.

    def __str__(self) -> str:
        return self.text


def policy_words(policy: "str | Path | Run") -> list[str]:
    """Return the overrides that select a policy: a model's folder, or the newest of a run.

    Raises: ConfigError: the run has no checkpoint, or it is neither a folder nor a run.
    """
    if not isinstance(policy, Run):
        folder = Path(policy).expanduser()
        if (folder / "config.json").is_file():
            return [f"model.path={folder.absolute()}"]
        try:
            policy = Run(policy)
        except ConfigError as error:
            if not folder.is_dir():
                raise
            raise ConfigError(
                f"{folder}: neither a model's folder, which has config.json, nor a run"
            ) from error
    checkpoints = policy.checkpoints
    if not checkpoints:
        raise ConfigError(f"{policy.path}: this run has no complete checkpoint")
    names = [f"run.dir={policy.path.parent}", f"run.name={policy.path.name}"]
    return [*names, f"model.path={checkpoints[-1].path}"]


class Policy:
    """A checkpoint, or the newest checkpoint of a run. The first `chat` starts its engine.

    Example:
        with Policy("runs/x") as policy:
            print(policy.chat("Name a color."))
    """

    def __init__(self, policy: "str | Path | Run", overrides: Overrides = NOTHING) -> None:
        """Select a policy.

        Args:
            policy: a model's folder, a run's folder, a run's name, or a `Run`.
            overrides: keys of the command `serve`, such as actor.kv_cache_gib.

        Raises: ConfigError: there is no such policy.
        """
        self._words = [*policy_words(policy), *overrides_of(overrides)]
        self._key = secrets.token_hex(16)
        self._program: CommandProcess | None = None
        self._model = ""
        self.url = ""  # Address of its OpenAI-compatible server; "" before the start.

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        named = [word for word in self._words if word.startswith("model.path=")]
        return Path(named[-1].removeprefix("model.path="))

    def start(self) -> None:
        """Start the engine, and wait until it answers.

        Raises: ConfigError, ProgramFailed: it cannot start.
        """
        if self._program is not None and self._program.is_running:
            return
        words = [*self._words, f"policy.api_key_env={KEY}", "policy.port=0"]
        self._program = CommandProcess("serve", overrides=words, environ={KEY: self._key})
        self._program.start()
        try:
            self.url, self._model = self._program.wait_for(SERVED).groups()
        except BaseException:
            self.close()
            raise

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        timeout_s: float = CHAT_S,
    ) -> ChatReply:
        """Return the policy's next message.

        Args:
            messages: a question, or a conversation in OpenAI's form.
            temperature: None: the one with which the policy was trained.
            tools: functions in OpenAI's form.

        Raises:
            ChatFailed: the server refused the conversation.
            ConfigError, ProgramFailed: the engine cannot start.
        """
        self.start()
        question = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        optional = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        body = {
            "model": self._model,
            "messages": [dict(each) for each in question],
            **{name: value for name, value in optional.items() if value is not None},
            **({"stop": list(stop)} if stop else {}),
            **({"tools": [dict(each) for each in tools]} if tools else {}),
        }
        answer = request(
            f"{self.url}/chat/completions",
            method="POST",
            body=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
            timeout_s=timeout_s,
            is_own=True,
        )
        if not answer.is_ok:
            raise ChatFailed(f"{answer.shown}: {answer.body.decode(errors='replace')[:2000]}")
        return _reply_of(json.loads(answer.body))

    def close(self) -> None:
        """End the engine."""
        if self._program is not None:
            self._program.stop()
        self._program = None

    def __enter__(self) -> "Policy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _reply_of(answer: dict[str, Any]) -> ChatReply:
    """Return the first choice of a server's answer."""
    choice = answer["choices"][0]
    message = {name: value for name, value in choice["message"].items() if value}
    usage = answer.get("usage") or {}
    return ChatReply(
        text=message.get("content", ""),
        thoughts=message.get("reasoning") or message.get("reasoning_content", ""),
        tool_calls=message.get("tool_calls", []),
        finish_reason=choice.get("finish_reason") or "",
        prompt_tokens=usage.get("prompt_tokens", 0),
        sampled_tokens=usage.get("completion_tokens", 0),
        message={"role": "assistant", "content": "", **message},
    )
