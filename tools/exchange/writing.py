"""Exports a run's episodes to common formats: AgentTraj, messages, ATIF, Parquet.

The token ids of an episode are split into the messages of its chat template. External text may
contain the letters of a control token. Control tokens are therefore identified by their ids. In the
decoded text each one becomes its id between two marks that no text contains.
"""

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from actor.formats.call_turn import CallTurn
from actor.formats.control_tokens import special_tokens
from actor.formats.renderer import Renderer
from common.errors import ConfigError
from common.formats.calls import NAME
from common.formats.chat_template import fingerprint, render_chat
from common.formats.turn_ends import TurnEnd
from common.ids import is_training_item
from common.repository import product_version
from common.segments import as_rows
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeKind, PolicyKind, Trajectory
from learner.journal.journal import read_journal
from learner.recovery.reward_log import read_group_rewards

logger = logging.getLogger(__name__)

_OPEN = "\ue000"
_CLOSE = "\ue001"
_MARK = re.compile(f"{_OPEN}\\d+{_CLOSE}")
_USER = "\u2402user\u2403"
_NEXT = "\u2402next\u2403"
_TOOL = r"[\w.-]{1,64}"  # The name of a tool before its result.
_NEVER = "\ue002"  # A character that no text contains.
FORMATS = ("json", "agenttraj", "sft", "parquet", "atif")
ATIF = "ATIF-v1.7"
FINGERPRINT = "tokenizer"  # Field with the fingerprint of the vocabulary and chat template.
REST = "rest_token_ids"  # Field of ATIF documents: the tokens after the last agent step.
ROWS_AT_ONCE = 1_000  # Rows of one write to a Parquet file.
COLUMNS = {  # Types of the Parquet columns, by their names in pyarrow.
    **dict.fromkeys(("episode_id", "group_id", "env", "item_id", "end_reason"), "string"),
    FINGERPRINT: "string",
    **dict.fromkeys(("segment", "num_segments", "num_turns"), "int32"),
    **{"reward": "float64", "success": "bool_"},
}
LISTS = {"token_ids": "int32", "loss_mask": "bool_", "logprobs": "float32", "versions": "int32"}
_SOURCES = {"assistant": "agent", "system": "system", "user": "user", "tool": "user"}  # ATIF names.


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One message. A sampled message is a contiguous run of tokens with `loss_mask` True."""

    role: str  # "system", "user", "tool" or "assistant" (the agent)
    text: str
    is_sampled: bool = False

    @property
    def is_agent(self) -> bool:
        return self.role == "assistant"


@dataclass(frozen=True, slots=True)
class _SystemFrame:
    """Text of a template before and after a system message."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """Text of a template around a message that follows an agent's message."""

    role: str
    end: TurnEnd  # End of the agent's message.
    ids: list[int]  # Tokens from that end to the message.
    named: str  # Name in these tokens that stands for the name of any tool; "": none.
    after: str


class Framing:
    """Text that one tokenizer's chat template adds around and between messages."""

    def __init__(self, tokenizer: Any, *, day: str = "") -> None:
        """Measure the chat template. Raises: ConfigError: as `Renderer`.

        Args:
            day: the date in the prompts, as in `render_chat`.
        """
        self.fingerprint = fingerprint(tokenizer)
        self._tokenizer = tokenizer
        self._day = day
        self._names = {
            number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()
        }
        self._names |= special_tokens(tokenizer)
        renderer = Renderer(tokenizer)
        turns = renderer.turns
        self._ends = {f"{_OPEN}{number}{_CLOSE}" for number in renderer.end_of_turn_ids}
        self._headers = sorted(map(self._framed, (turns.asked, turns.answered)), key=len)
        user = {"role": "user", "content": _USER}
        self._head = self._framed(self._render([user]).partition(_USER)[0])
        self._after = self._framed(turns.closed)
        ids = self._encoded(turns.between)
        self._user = _Frame("user", renderer.turn_end, ids, "", self._after)
        self._frames = [self._user]
        self._system = self._system_frame(user)
        call = renderer.call_turn
        if isinstance(call, CallTurn) and self._encoded(call.between) != ids:
            after = self._framed(call.after.removesuffix(turns.asked))
            ids = self._encoded(call.between)
            self._frames.append(_Frame("tool", renderer.call_turn_end, ids, NAME, after))
            self._headers.append(self._framed(call.answered))
            self._ends.add(f"{_OPEN}{renderer.call_turn_end.run[0]}{_CLOSE}")
        self._headers.sort(key=len, reverse=True)

    def messages(self, token_ids: np.ndarray, loss_mask: np.ndarray) -> list[Spoken]:
        """Return the messages of a row of tokens, user and agent in turn.

        Args:
            token_ids, loss_mask: [seq]

        Raises: ConfigError: the tokens do not match this template.
        """
        edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(token_ids)]
        spoken: list[Spoken] = []
        for start, end in itertools.pairwise(edges):
            text = self._marked(token_ids[start:end].tolist())
            if loss_mask[start]:
                spoken.append(Spoken(role="assistant", text=self._answer(text), is_sampled=True))
                continue
            if start == 0:
                spoken += self._begun(text)
                continue
            frame = self._next(text, int(token_ids[start - 1]))
            if frame is None and end == len(token_ids):
                break  # The template's text after the last turn.
            if frame is None:
                raise self._mismatch(text, self._marked(self._user.ids))
            spoken += self._unsampled(*frame)
        return spoken

    def _next(self, text: str, last: int) -> tuple[_Frame, str] | None:
        """Return the frame of the message after a sampled answer, and the text from there on.

        Args:
            text: framed text after the answer.
            last: last token of the answer.
        """
        candidates: list[tuple[int, _Frame]] = []
        is_stopped = f"{_OPEN}{last}{_CLOSE}" in self._ends
        for frame in self._frames:
            num = frame.end.num_sampled(last, is_stopped=is_stopped)
            if begun := self._before(frame, num).match(text):
                candidates.append((begun.end(), frame))
        if not candidates:
            return None
        length, frame = max(
            candidates, key=lambda each: each[0]
        )  # One may be a prefix of the other.
        return frame, text[length:]

    def _before(self, frame: _Frame, num: int) -> re.Pattern[str]:
        """Return the pattern of the text before a message, without tokens of the answer's end."""
        pieces = self._marked(frame.ids[num:]).split(frame.named or _NEVER)
        return re.compile(_TOOL.join(map(re.escape, pieces)))

    def _answer(self, text: str) -> str:
        """Return an answer without the tokens that end it. Other tokens have their names."""
        while (mark := text[text.rfind(_OPEN) :] if text.endswith(_CLOSE) else "") in self._ends:
            text = text.removesuffix(mark)
        return self._named(text)

    def _named(self, text: str) -> str:
        """Return framed text with the names of its control tokens."""
        return _MARK.sub(lambda mark: self._names.get(int(mark[0][1:-1]), ""), text)

    def _begun(self, text: str) -> list[Spoken]:
        """Return the messages before the first sampled one."""
        if text.startswith(self._head) and not self._has_system(text):
            return self._unsampled(self._user, text[len(self._head) :])
        frame = self._system
        if frame is not None and text.startswith(frame.before):
            system, separator, rest = text[len(frame.before) :].partition(frame.after)
            if separator:
                return [self._instruction(system), *self._unsampled(self._user, rest)]
        # The tools of a prompt may stand in any place before the first message of the user.
        opening = self._marked(self._user.ids[self._num_end :])
        system, separator, rest = text.partition(opening)
        if not (separator and _MARK.search(opening)):
            raise self._mismatch(text, self._head)
        return [self._instruction(system), *self._unsampled(self._user, rest)]

    @property
    def _num_end(self) -> int:
        """Number of tokens that end an answer before a user's message."""
        end = self._user.end
        return len(end.lead) + len(end.run)

    def _instruction(self, system: str) -> Spoken:
        return Spoken(role="system", text=self._named(system))

    def _mismatch(self, text: str, expected: str) -> ConfigError:
        """Return the error for tokens that the chat template does not produce."""
        return ConfigError(
            f"the run's chat template does not produce its tokens: {self._named(text)!r:.80} stands"
            f" in the place of {self._named(expected)!r:.80}; use format=json, which needs no"
            " template"
        )

    def _has_system(self, text: str) -> bool:
        """Return whether a text that begins like a user's message begins with a system message."""
        frame = self._system
        return (
            frame is not None
            and text.startswith(frame.before)
            and _MARK.search(frame.after) is not None
            and frame.before == self._head
            and frame.after in text[len(frame.before) :].partition(self._after)[0]
        )

    def _unsampled(self, frame: _Frame, text: str) -> list[Spoken]:
        """Return the messages of a text that begins with a message of a frame."""
        messages: list[Spoken] = []
        while True:
            inner, separator, rest = text.partition(frame.after)
            if not separator:
                raise self._mismatch(text, frame.after)
            text = rest
            messages.append(Spoken(role=frame.role, text=self._named(inner)))
            # A header that is whitespace may also be the start of the frame after an empty answer.
            headers = [each for each in self._headers if each and text.startswith(each)]
            rests = [text.removeprefix(each) for each in (*headers, "")]
            if "" in rests:
                return messages
            found_in = [(rest, ends) for rest in rests if (ends := self._ends_in(rest))]
            if not found_in:
                raise self._mismatch(rests[0], self._marked(self._user.ids))
            text, ends = found_in[0]
            begun, frame = _first_place(ends)
            messages.append(Spoken(role="assistant", text=self._named(text[: begun.start()])))
            text = text[begun.end() :]

    def _ends_in(self, text: str) -> list[tuple[re.Match[str], _Frame]]:
        """Return the first place of each frame in a text."""
        matches = [(self._before(each, 0).search(text), each) for each in self._frames]
        return [(place, each) for place, each in matches if place is not None]

    def _system_frame(self, user: dict[str, Any]) -> _SystemFrame | None:
        """Return the frame of a system message; None: the template supports none."""
        try:
            text = self._render([{"role": "system", "content": _NEXT}, user])
        except (TemplateError, TypeError):
            return None
        before, separator, rest = text.partition(_NEXT)
        between, has_user, _ = rest.partition(_USER)
        if not (separator and has_user and between):
            return None
        return _SystemFrame(self._framed(before), self._framed(between))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        """Return the chat template's text. Raises: ConfigError: the tokenizer has no template."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so tokens cannot be split into messages; use"
                " --format json"
            )
        return render_chat(self._tokenizer, messages, day=self._day)

    def _framed(self, text: str) -> str:
        return self._marked(self._encoded(text))

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _marked(self, token_ids: list[int]) -> str:
        """Return the text with each control token's id between two marks."""
        parts: list[str] = []
        for is_control, run in itertools.groupby(token_ids, self._names.__contains__):
            if is_control:
                parts += [f"{_OPEN}{number}{_CLOSE}" for number in run]
            else:
                parts.append(self._tokenizer.decode(list(run)))
        return "".join(parts)


def _first_place(places: list[tuple[re.Match[str], _Frame]]) -> tuple[re.Match[str], _Frame]:
    """Return the first frame in a text, the longer one of two that overlap.

    A frame of tool results may continue that of a user's message.
    """
    first, *others = sorted(places, key=lambda place: place[0].start())
    for place in others:
        if place[0].start() < first[0].end() < place[0].end():
            first = place
    return first


def load_framing(folder: Path, *, day: str = "") -> Framing:
    """Return the framing of a run's tokenizer. Raises: ConfigError: the run has no tokenizer.

    Args:
        day: the date in the run's prompts, as in `render_chat`.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder}: the run has no tokenizer. Use format=json, which needs none")
    transformers = import_module("transformers")
    return Framing(transformers.AutoTokenizer.from_pretrained(str(folder)), day=day)


def write(format: str, path: Path, episodes: Iterable[Trajectory], framing: Framing) -> int:
    """Write the sampled episodes, one row per segment; return the number of rows.

    Scripted play, evaluation on held-out items and infrastructure failures are left out.

    Raises: ConfigError: pyarrow is missing, or the tokens do not match the tokenizer's template.
    """
    rows = _rows(episodes, framing)
    if format == "parquet":
        return _write_parquet(path, rows, framing.fingerprint)
    record_of = _RECORDS[format]
    num = 0
    with path.open("w", encoding="utf-8") as out:
        for row, number, count, messages in rows:
            record = record_of(row, number, count, messages)
            if record_of is _atif:  # Its steps have the tokens.
                record["extra"][FINGERPRINT] = framing.fingerprint
            else:
                record |= _tokens(row, framing.fingerprint)
            out.write(json.dumps(record) + "\n")
            num += 1
    return num


_Row = tuple[Trajectory, int, int, list[Spoken]]  # Segment, its number, their count, messages.


def _rows(episodes: Iterable[Trajectory], framing: Framing) -> Iterator[_Row]:
    """Yield each segment of the exported episodes, with its number and its messages."""
    for episode in filter(_is_trainable, episodes):
        parts = as_rows(episode)
        for number, part in enumerate(parts):
            try:
                spoken = framing.messages(part.token_ids, part.loss_mask)
            except ConfigError as error:
                raise ConfigError(f"{episode.episode_id}: {error}") from error
            yield part, number, len(parts), spoken


def trainable_episodes(journal: Path) -> Iterator[Trajectory]:
    """Yield the episodes of a journal that the model sampled, with their trained rewards.

    Scripted play, evaluation on held-out items and infrastructure failures are left out. In a run
    with `groups.reward` the reward is that of the group. Episodes without one are left out, and
    their number is logged.

    Raises: ConfigError: the log of group rewards is damaged. WireError: the journal is.
    """
    log = journal / RunDir(root=journal).group_rewards.name
    has_rewards = log.exists()
    rewards = read_group_rewards(log)
    num_without = 0
    for _, episode in read_journal(journal):
        if not _is_trainable(episode):
            continue
        reward = rewards.get(episode.group_id)
        if reward is not None and episode.member in reward.rewards:
            yield reward.applied(episode)
        elif has_rewards:
            num_without += 1
        else:
            yield episode
    if num_without:
        logger.warning(
            "%s: left out episodes=%d, because they have no reward of their group", log, num_without
        )


def _is_trainable(episode: Trajectory) -> bool:
    """Return whether an episode was sampled by the model, and may be trained on."""
    is_held_out = episode.kind is EpisodeKind.EVAL and not is_training_item(episode.item_id)
    is_failure = episode.end_reason.is_infrastructure_failure
    is_sampled = episode.policy is PolicyKind.MODEL and bool(episode.loss_mask.any())
    return is_sampled and not is_failure and not is_held_out


def _about(row: Trajectory, number: int, count: int) -> dict[str, Any]:
    """Return the fields that describe an episode, for any format."""
    return {
        **{"episode_id": row.episode_id, "group_id": row.group_id, "env": row.env},
        **{"item_id": row.item_id, "end_reason": row.end_reason.value},
        **{"segment": number, "num_segments": count, "num_turns": row.num_turns},
        **{"reward": row.reward, "success": row.is_success},
    }


def _agenttraj(row: Trajectory, number: int, count: int, spoken: list[Spoken]) -> dict[str, Any]:
    """Return a segment in AgentTraj's format."""
    messages: list[dict[str, Any]] = []
    for message in spoken:
        if message.is_agent:
            messages.append({"from": "gpt", "loss": message.is_sampled, "value": message.text})
        else:
            role = {} if message.role == "user" else {"role": message.role}
            messages.append({"from": "human", "loss": None, "value": message.text, **role})
    return {"conversations": messages, **_about(row, number, count)}


def _sft(row: Trajectory, number: int, count: int, spoken: list[Spoken]) -> dict[str, Any]:
    """Return a segment as messages."""
    return {"messages": _messages(spoken), **_about(row, number, count)}


def _tokens(row: Trajectory, fingerprint: str) -> dict[str, Any]:
    """Return the tokens of a row. They replace the texts where the fingerprint is the same."""
    return {
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.loss_mask.astype(bool).tolist(),
        FINGERPRINT: fingerprint,
    }


def _messages(messages: list[Spoken]) -> list[dict[str, Any]]:
    """Return messages. Weight 0, as in OpenAI's format, marks an answer that was not sampled."""
    return [
        {
            "role": message.role,
            "content": message.text,
            **({"weight": 0} if message.is_agent and not message.is_sampled else {}),
        }
        for message in messages
    ]


def _atif(row: Trajectory, number: int, count: int, spoken: list[Spoken]) -> dict[str, Any]:
    """Return an ATIF 1.7 document. Its agent steps have the prompt tokens and sampled tokens."""
    changes = np.flatnonzero(np.diff(row.loss_mask, prepend=False, append=False))
    edges: list[int] = [int(edge) for edge in changes]
    spans = iter(zip(edges[::2], edges[1::2], strict=True))
    steps: list[dict[str, Any]] = []
    for message in spoken:
        step: dict[str, Any] = {"step_id": len(steps) + 1, "message": message.text}
        step["source"] = _SOURCES[message.role]
        if message.is_sampled:
            step["metrics"] = _metrics(row, *next(spans))
        elif message.is_agent:
            step["is_copied_context"] = True  # ATIF's field for answers that are not trained.
        steps.append(step)
    sampled = int(row.loss_mask.sum())
    # No agent step has the tokens after the last one.
    rest: list[int] = row.token_ids[edges[-1] :].tolist() if edges else []
    return {
        "schema_version": ATIF,
        "session_id": row.episode_id,
        "trajectory_id": f"{row.episode_id}#{number}",
        "agent": {"name": "longstride", "version": product_version()},
        "steps": steps,
        "final_metrics": {"total_completion_tokens": sampled, "total_steps": len(steps)},
        "extra": _about(row, number, count) | ({REST: rest} if rest else {}),
    }


def _metrics(row: Trajectory, first: int, last: int) -> dict[str, Any]:
    """Return the prompt tokens of a turn, and its sampled tokens in [first, last)."""
    return {
        **{"prompt_tokens": first, "completion_tokens": last - first},
        "prompt_token_ids": row.token_ids[:first].tolist(),
        "completion_token_ids": row.token_ids[first:last].tolist(),
        "logprobs": row.logprobs[first:last].tolist(),
        "extra": {"versions": row.versions[first:last].tolist()},
    }


_RECORDS: dict[str, Callable[[Trajectory, int, int, list[Spoken]], dict[str, Any]]] = {
    "agenttraj": _agenttraj,
    "sft": _sft,
    "atif": _atif,
}


def arrow(module: str) -> Any:
    """Return a module of pyarrow. Raises: ConfigError: it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow. Install it with: pip install pyarrow (the extra `data`)"
        ) from error


def _write_parquet(path: Path, rows: Iterator[_Row], fingerprint: str) -> int:
    """Write the rows in batches; return their number."""
    pa = arrow("pyarrow")
    parquet = arrow("pyarrow.parquet")
    kinds = {"role": "string", "content": "string", "weight": "int32"}
    message = pa.struct([(name, getattr(pa, kind)()) for name, kind in kinds.items()])
    fields = [(name, getattr(pa, kind)()) for name, kind in COLUMNS.items()]
    fields += [(name, pa.list_(getattr(pa, kind)())) for name, kind in LISTS.items()]
    schema = pa.schema([*fields, ("messages", pa.list_(message))])
    num = 0
    with parquet.ParquetWriter(str(path), schema, compression="zstd") as out:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            records = [
                _sft(*row)
                | {name: getattr(row[0], name).tolist() for name in LISTS}
                | {FINGERPRINT: fingerprint}
                for row in some
            ]
            out.write_table(pa.Table.from_pylist(records, schema=schema))
            num += len(records)
    return num
