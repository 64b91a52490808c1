"""Episodes as token rows, from a run's journal or from a file of conversations."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.control_tokens import ControlTokens
from common.errors import ConfigError
from common.exchange.records import read_records, tokens_of
from common.exchange.writing import TRAIN_ITEM
from common.formats.chat_template import render_chat
from common.segments import as_rows
from common.store.agent_traj import Conversation, read_conversations
from common.store.journal import read_journal
from common.wire.messages import EpisodeKind, PolicyKind, Trajectory
from learner.batch.batching import TokenBatch, collate_tokens


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
    found = [tokens_of(record, place) for place, record in read_records(path)]
    if not found or not all(found):
        control = ControlTokens(tokenizer)
        return [row_of_conversation(tokenizer, c, control) for c in read_conversations(path)]
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
    is_held_out = trajectory.kind is EpisodeKind.EVAL and TRAIN_ITEM not in trajectory.item_id
    return (
        trajectory.policy is PolicyKind.MODEL
        and not is_held_out
        and not trajectory.end_reason.is_infrastructure_failure
        and bool(trajectory.loss_mask.any())
    )


def row_of_conversation(
    tokenizer: Any, conversation: Conversation, control: ControlTokens | None = None
) -> Row:
    """Return a conversation as the tokenizer's chat template renders it.

    If a message contains a control token as text, it is encoded as ordinary characters. `control`
    are the tokenizer's control tokens; None: they are determined here.

    The template renders every prefix of the messages. The difference between two prefixes is the
    text of one message. Of an agent's message the text up to the end-of-turn token is trained. Text
    after the end-of-turn token, such as a line feed, is not trained, because a policy never samples
    it.

    Raises:
        ConfigError: the template changes earlier turns when later ones are added.
    """
    ids: list[int] = []
    mask: list[bool] = []
    done = ""
    chat: list[dict[str, str]] = []
    special = set(tokenizer.all_special_ids)
    control = control or ControlTokens(tokenizer)
    for message in conversation.messages:
        role = "assistant" if message.is_agent else "user"
        chat.append({"role": role, "content": control.broken(message.text)})
        rendered = render_chat(tokenizer, chat, add_generation_prompt=not message.is_agent)
        if not rendered.startswith(done):
            raise ConfigError(
                "The model's chat template changes earlier turns when a turn is added, so a"
                " conversation cannot be split into turns. Use another chat template."
            )
        part = control.encode(rendered[len(done) :])
        done = rendered
        ends = [i for i, token in enumerate(part) if token in special]
        num_learnt = (ends[-1] + 1 if ends else len(part)) if message.is_trained else 0
        ids += part
        mask += [i < num_learnt for i in range(len(part))]
    return Row(
        item_id=conversation.item_id,
        reward=conversation.reward,
        is_success=conversation.is_success,
        token_ids=np.array(ids, dtype=np.int32),
        mask=np.array(mask, dtype=bool),
    )


def token_batch(rows: list[Row], device: Any, *, is_packed: bool) -> TokenBatch:
    """Return rows as one batch that scores exactly the trained tokens."""
    masks = [row.mask & (np.arange(len(row.mask)) > 0) for row in rows]
    ids = [row.token_ids for row in rows]
    return collate_tokens(ids, masks, device=device, is_packed=is_packed)
