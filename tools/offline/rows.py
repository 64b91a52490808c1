"""Episodes as token rows, from a run's journal or from a file of conversations."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from common.config.actor import KeepThinking
from common.errors import ConfigError
from common.formats.chat_template import fingerprint
from common.segments import as_rows
from common.store.run_dir import RunDir
from learner.batch.batching import TokenBatch, collate_tokens
from tools.exchange.agent_traj import (
    Conversation,
    conversation_of,
    read_conversations,
    valid_conversations,
)
from tools.exchange.records import preference_of, read_records, tokens_of
from tools.exchange.writing import trainable_episodes
from tools.offline.written_answers import AnswerWriter, segments_of

logger = logging.getLogger(__name__)


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


def read_rows(
    path: Path,
    *,
    tokenizer: Any,
    max_tokens: int,
    key: str,
    keep_thinking: KeepThinking = KeepThinking.ALL,
) -> list[Row]:
    """Return the episodes of a run directory, of its `journal/`, or of a file.

    A file holds AgentTraj's records, messages or ATIF documents, as JSON lines or Parquet. If its
    records contain token ids, these are used unchanged.

    Tokens of a journal are used as they were sampled, one row per segment. Failures of the
    infrastructure, scripted play and evaluation on held-out items are left out. Rewards of
    `groups.reward` replace those of the environment. Rows are truncated on the right at
    `max_tokens`. A row without trained tokens is left out.

    Args:
        key: the setting that named `path`, for error messages.
        keep_thinking: thoughts of earlier answers in the prompts of conversations without tokens.

    Raises:
        ConfigError: the path does not exist, or it holds no usable episode.
    """
    folder = path / "journal" if (path / "journal").is_dir() else path
    if folder.is_dir():
        rows = [
            Row(
                item_id=f"{t.env}/{t.item_id}",
                reward=t.reward,
                token_ids=part.token_ids,
                mask=part.loss_mask,
                is_success=t.is_success,
                segment=segment,
                num_segments=len(parts),
                episode=t.episode_id,
            )
            for t in trainable_episodes(folder)
            for parts in [as_rows(t)]
            for segment, part in enumerate(parts)
        ]
        _check_vocabulary(rows, folder, tokenizer, key=key)
    elif path.is_file():
        rows = _rows_of_file(path, tokenizer, keep_thinking, key=key)
    else:
        raise ConfigError(f"{key}={path}: expected a run directory or a file")
    rows = [
        replace(row, token_ids=row.token_ids[:max_tokens], mask=row.mask[:max_tokens])
        for row in rows
    ]
    usable = [row for row in rows if row.mask[1:].any()]
    if not usable:
        raise ConfigError(f"{key}={path}: no episode has a token to train on")
    return usable


def num_episodes(rows: Sequence[Row]) -> int:
    """Return the number of episodes in the rows. Some rows of an episode may be missing."""
    return len(_starts(rows))


def newest(rows: list[Row], max_episodes: int) -> list[Row]:
    """Return all rows of the last `max_episodes` episodes."""
    starts = _starts(rows)
    return rows[starts[-max_episodes] :] if len(starts) > max_episodes else rows


def first_plays(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without the second and later plays of an episode, by the episode's id."""
    starts = _starts(rows)
    ends = [*starts[1:], len(rows)]
    by_episode: dict[str, Sequence[Row]] = {}
    for start, end in zip(starts, ends, strict=True):
        by_episode.setdefault(rows[start].episode, rows[start:end])
    return [row for play in by_episode.values() for row in play]


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
    # A segment that was read as messages may be several rows.
    is_part = before.segment == row.segment and row.episode != ""
    return is_same and (before.segment < row.segment or is_part)


def _rows_of_file(path: Path, tokenizer: Any, keep: KeepThinking, *, key: str) -> list[Row]:
    """Return the token ids of a file if all records have them; else tokenize its conversations."""
    expected = fingerprint(tokenizer)
    records = read_records(path)
    if key == "dpo.data" and (preferences := _preferences(records, path)):
        writer = AnswerWriter(tokenizer)
        return [row for each in preferences for row in rows_of_conversation(each, writer, keep)]
    tokens = [tokens_of(record, place, fingerprint=expected) for place, record in records]
    if not tokens or not all(tokens):
        if any(tokens):
            logger.warning(
                "%s: records=%d of %d have no tokens of this tokenizer, so the messages of all"
                " records are encoded",
                path,
                sum(not row for row in tokens),
                len(tokens),
            )
        writer = AnswerWriter(tokenizer)
        conversations = read_conversations(path)
        return [row for each in conversations for row in rows_of_conversation(each, writer, keep)]
    rows = [
        Row(
            item_id=token_row.item_id,
            reward=token_row.reward,
            token_ids=token_row.token_ids,
            mask=token_row.mask,
            is_success=token_row.is_success,
            segment=token_row.segment,
            num_segments=token_row.num_segments,
            episode=token_row.episode_id,
        )
        for token_row in tokens
        if token_row
    ]
    _check_ids(rows, path, tokenizer)
    return rows


def _check_ids(rows: Sequence[Row], path: Path, tokenizer: Any) -> None:
    """Raise ConfigError if a token id is outside of the vocabulary."""
    largest = max((int(row.token_ids.max(initial=0)) for row in rows), default=0)
    if largest >= len(tokenizer):
        raise ConfigError(
            f"{path}: token id {largest} is outside the model's vocabulary of {len(tokenizer)}"
            " tokens. The file was written with another tokenizer. Export it again as messages"
            " (--format sft)."
        )


def _check_vocabulary(rows: Sequence[Row], folder: Path, tokenizer: Any, *, key: str) -> None:
    """Raise ConfigError if a token of a run's journal is another one in the model's vocabulary.

    Args:
        folder: the journal, beside which a run has its tokenizer.
    """
    _check_ids(rows, folder, tokenizer)
    file = RunDir(root=folder.parent).tokenizer / "tokenizer.json"
    if not file.is_file():
        return
    vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    of_run = {number: token for token, number in vocabulary.items()}
    of_model = {number: token for token, number in tokenizer.get_vocab().items()}
    is_used = np.zeros(len(tokenizer), dtype=bool)
    for row in rows:
        is_used[row.token_ids] = True
    for number in map(int, np.flatnonzero(is_used)):
        if of_run.get(number) != of_model.get(number):
            raise ConfigError(
                f"{key}={folder.parent}: token {number} is {of_run.get(number)!r} in the run and"
                f" {of_model.get(number)!r} in the model's vocabulary. Export the run as messages"
                " (journal export --format sft)"
            )


def _preferences(records: Sequence[tuple[str, object]], path: Path) -> list[Conversation]:
    """Return both episodes of each preference; [] if the file has none.

    Raises: ConfigError: a record is malformed, or only some are preferences.
    """
    pairs = [(place, preference_of(record, place)) for place, record in records]
    if not any(pair for _, pair in pairs):
        return []
    episodes: list[Conversation] = []
    for place, pair in pairs:
        if pair is None:
            raise ConfigError(
                f"{place}: 'chosen' and 'rejected' are missing; other records have them"
            )
        episodes += [
            conversation_of(episode, f"{place}, {name}")
            for name, episode in zip(("chosen", "rejected"), pair, strict=True)
        ]
    return valid_conversations(episodes, path)


def row_of_conversation(
    tokenizer: Any, conversation: Conversation, writer: AnswerWriter | None = None
) -> Row:
    """Return a conversation as a rollout of the same model would show it, with all thoughts.

    The prompt, the text between turns and the generation prompts are those of the chat template.
    An answer is trained with the token that ends it, and never with the template's text around it.

    Args:
        writer: encodes answers for this tokenizer; None: it is made here.

    Raises:
        ConfigError: the template cannot show the conversation; names the record and the field.
    """
    (row,) = rows_of_conversation(conversation, writer or AnswerWriter(tokenizer))
    return row


def rows_of_conversation(
    conversation: Conversation, writer: AnswerWriter, keep: KeepThinking = KeepThinking.ALL
) -> list[Row]:
    """Return a conversation as a rollout of the same model would show it, one row per segment.

    Args:
        keep: `actor.keep_thinking`. A segment ends where earlier thoughts are dropped.

    Raises: ConfigError: as `row_of_conversation`.
    """
    try:
        segments = segments_of(conversation, writer, keep)
    except ValueError as error:
        raise ConfigError(f"{conversation.place or conversation.item_id}: {error}") from error
    return [
        Row(
            item_id=conversation.item,
            reward=conversation.reward,
            is_success=conversation.is_success,
            token_ids=np.array([each for part, _ in parts for each in part], dtype=np.int32),
            mask=np.array([trained for part, trained in parts for _ in part], dtype=bool),
            segment=conversation.segment + number,
            num_segments=conversation.num_segments + len(segments) - 1,
            episode=conversation.episode_id or conversation.place,
        )
        for number, parts in enumerate(segments)
    ]


def token_batch(rows: Sequence[Row], device: Any, *, is_packed: bool) -> TokenBatch:
    """Return rows as one batch that scores exactly the trained tokens."""
    masks = [row.mask & (np.arange(len(row.mask)) > 0) for row in rows]
    ids = [row.token_ids for row in rows]
    return collate_tokens(ids, masks, device=device, is_packed=is_packed)
