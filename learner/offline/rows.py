"""Episodes as token rows, from a run's journal or from a file of conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.exchange.records import read_records, tokens_of
from common.exchange.writing import TRAIN_ITEM
from common.formats.chat_renderer import ChatRenderer
from common.formats.chat_template import fingerprint
from common.formats.measured import RESULT_ID, in_order
from common.formats.thoughts import FIELDS
from common.segments import as_rows
from common.store.agent_traj import Conversation, Message, read_conversations
from common.store.journal import read_journal
from common.wire.messages import EpisodeKind, PolicyKind, Trajectory
from learner.batch.batching import TokenBatch, collate_tokens
from learner.offline.written_answers import AnswerWriter, WrittenAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One episode or one segment of it: tokens, mask of the agent's tokens, and reward."""

    item_id: str
    reward: float
    token_ids: np.ndarray = field(repr=False)  # [seq] int32
    mask: np.ndarray = field(repr=False)  # [seq] bool, True on the trained tokens
    is_success: bool = False  # The environment reported success, independent of the reward.
    segment: int = 0  # Index within the episode.
    num_segments: int = 1  # Number of segments of the episode.
    episode: str = ""  # Episode id, different from that of neighbouring episodes; "": unknown.

    def is_worth(self, min_reward: float) -> bool:
        """Return whether the reward reaches a minimum. A minimum of 1 also accepts any success."""
        return self.reward >= min_reward or (self.is_success and min_reward == 1.0)


def read_rows(path: Path, *, tokenizer: Any, max_tokens: int, key: str) -> list[Row]:
    """Return the episodes of a run directory, of its `journal/`, or of a file.

    A file holds AgentTraj's records, messages or ATIF documents, as JSON lines or Parquet. If its
    records contain token ids, these are used unchanged.

    Tokens of a journal are used as they were sampled, one row per segment. Failures of the
    infrastructure, scripted play and evaluation on held-out items are left out. Rows are truncated
    on the right at `max_tokens`. A row without trained tokens is left out.

    Args:
        key: the setting that named `path`, for error messages.

    Raises:
        ConfigError: the path does not exist, or it holds no usable episode.
    """
    folder = path / "journal" if (path / "journal").is_dir() else path
    if folder.is_dir():
        rows = [
            Row(
                item_id=f"{t.env}/{t.item_id}",
                reward=t.reward,
                token_ids=own.token_ids,
                mask=own.loss_mask,
                is_success=t.is_success,
                segment=segment,
                num_segments=max(len(t.segment_starts), 1),
                episode=t.episode_id,
            )
            for _, t in read_journal(folder)
            if _is_usable(t)
            for segment, own in enumerate(as_rows(t))
        ]
    elif path.is_file():
        rows = _rows_of_file(path, tokenizer)
    else:
        raise ConfigError(f"{key}={path}: expected a run directory or a file")
    rows = [
        replace(row, token_ids=row.token_ids[:max_tokens], mask=row.mask[:max_tokens])
        for row in rows
    ]
    kept = [row for row in rows if row.mask[1:].any()]
    if not kept:
        raise ConfigError(f"{key}={path}: no episode has a token to train on")
    return kept


def num_episodes(rows: Sequence[Row]) -> int:
    """Return the number of episodes in the rows. Some rows of an episode may be missing."""
    return len(_starts(rows))


def newest(rows: list[Row], max_episodes: int) -> list[Row]:
    """Return all rows of the last `max_episodes` episodes."""
    starts = _starts(rows)
    return rows[starts[-max_episodes] :] if len(starts) > max_episodes else rows


def _starts(rows: Sequence[Row]) -> list[int]:
    """Return the index of the first row of each episode.

    The rows of an episode are neighbours, and their segments are in order. The first segment may be
    absent, because a row without trained tokens is left out.
    """
    pairs = zip([None, *rows], rows, strict=False)
    return [
        index
        for index, (before, row) in enumerate(pairs)
        if before is None or not _is_continued(before, row)
    ]


def _is_continued(before: Row, row: Row) -> bool:
    """Return whether the row belongs to the same episode as the row before it."""
    is_same = (before.item_id, before.episode) == (row.item_id, row.episode)
    return is_same and before.segment < row.segment


def _rows_of_file(path: Path, tokenizer: Any) -> list[Row]:
    """Return the token ids of a file if all records have them; else tokenize its conversations."""
    own = fingerprint(tokenizer)
    found = [tokens_of(record, place, fingerprint=own) for place, record in read_records(path)]
    if not found or not all(found):
        writer = AnswerWriter(tokenizer)
        return [row_of_conversation(tokenizer, c, writer) for c in read_conversations(path)]
    rows = [
        Row(
            item_id=each.item_id,
            reward=each.reward,
            token_ids=each.token_ids,
            mask=each.mask,
            is_success=each.is_success,
            segment=each.segment,
            num_segments=each.num_segments,
            episode=each.episode_id,
        )
        for each in found
        if each
    ]
    largest = max(int(row.token_ids.max(initial=0)) for row in rows)
    if largest >= len(tokenizer):
        raise ConfigError(
            f"{path}: token id {largest} is outside the model's vocabulary of {len(tokenizer)}"
            " tokens. The file was written with another tokenizer. Export it again as messages"
            " (--format sft)."
        )
    return rows


def _is_usable(trajectory: Trajectory) -> bool:
    """Return whether an episode was sampled by the model, and may be trained on."""
    is_held_out = trajectory.kind is EpisodeKind.EVAL and TRAIN_ITEM not in trajectory.item_id
    return (
        trajectory.policy is PolicyKind.MODEL
        and not is_held_out
        and not trajectory.end_reason.is_infrastructure_failure
        and bool(trajectory.loss_mask.any())
    )


def row_of_conversation(
    tokenizer: Any, conversation: Conversation, writer: AnswerWriter | None = None
) -> Row:
    """Return a conversation as a rollout of the same model would show it.

    The prompt, the text between turns and the generation prompts are those of the chat template.
    An answer is trained with the token that ends it, and never with the template's text around it.

    Args:
        writer: encodes answers for this tokenizer; None: it is made here.

    Raises:
        ConfigError: the template cannot show the conversation; names the record and the field.
    """
    writer = writer or AnswerWriter(tokenizer)
    try:
        parts = list(_parts_of(conversation, writer))
    except ValueError as error:
        raise ConfigError(f"{conversation.place or conversation.item_id}: {error}") from error
    ids = [each for part, _ in parts for each in part]
    mask = [is_trained for part, is_trained in parts for _ in part]
    return Row(
        item_id=conversation.item_id,
        reward=conversation.reward,
        is_success=conversation.is_success,
        token_ids=np.array(ids, dtype=np.int32),
        mask=np.array(mask, dtype=bool),
    )


def _parts_of(conversation: Conversation, writer: AnswerWriter) -> Iterator[tuple[list[int], bool]]:
    """Yield consecutive token ids, and whether they are trained."""
    tools = conversation.tools
    shown: list[dict[str, Any]] = []  # Messages since the last answer.
    last: WrittenAnswer | None = None
    calls: list[dict[str, Any]] = []  # Calls of the last answer.
    given: list[dict[str, Any]] = []  # The same calls, as the record has them.
    for each in conversation.messages:
        message = _as_chat(each)
        if not each.is_agent:
            shown.append(message)
            continue
        answer = writer.write(message, tools=tools)
        prompt = _prompt(writer.renderer, _with_results(shown, given), tools, last, calls)
        yield writer.with_header(prompt, answer.header), False
        yield answer.sampled, each.is_trained
        shown = []
        last = answer
        calls = answer.calls
        given = each.calls
    if shown:
        yield _prompt(writer.renderer, _with_results(shown, given), tools, last, calls), False


def _with_results(shown: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages after an answer, whose first ones are the results of its calls in order.

    Raises: ValueError: a result has the id of no call.
    """
    others = (i for i, each in enumerate(shown) if each["role"] != "tool")
    num = next(others, len(shown))
    return [*in_order(shown[:num], calls), *shown[num:]]


def _prompt(
    renderer: ChatRenderer,
    shown: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    last: WrittenAnswer | None,
    calls: list[dict[str, Any]],
) -> list[int]:
    """Return the tokens from the last answer, or from the beginning, to the next answer."""
    if not shown:
        raise ValueError("messages: the agent's message follows none of the environment")
    is_user = [each["role"] for each in shown] == ["user"]
    text = str(shown[0]["content"])
    if last is None:
        if is_user and not tools:
            return renderer.first_prompt(text)
        return renderer.of_messages(shown, tools=tools)
    end = last.sampled[-1]
    if is_user and not calls:
        return renderer.after_turn(text, is_stopped=True, end=end)
    has_calls = bool(calls) or shown[0]["role"] == "tool"
    how: dict[str, Any] = {"is_stopped": True, "has_calls": has_calls, "calls": calls, "end": end}
    return renderer.after_calls(shown, tools=tools, **how)


def _as_chat(message: Message) -> dict[str, Any]:
    """Return a message in the format of chat templates."""
    found: dict[str, Any] = {"role": message.chat_role, "content": message.text}
    if message.call_id:
        found[RESULT_ID] = message.call_id
    if message.thoughts:
        found[FIELDS[0]] = message.thoughts
    return {**found, "tool_calls": message.calls} if message.calls else found


def token_batch(rows: list[Row], device: Any, *, is_packed: bool) -> TokenBatch:
    """Return rows as one batch that scores exactly the trained tokens."""
    masks = [row.mask & (np.arange(len(row.mask)) > 0) for row in rows]
    ids = [row.token_ids for row in rows]
    return collate_tokens(ids, masks, device=device, is_packed=is_packed)
