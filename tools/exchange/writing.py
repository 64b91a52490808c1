"""Exports a run's episodes to common formats: AgentTraj, messages, ATIF, Parquet."""

import json
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.repository import product_version
from common.segments import as_rows
from common.wire.messages import EpisodeKind, PolicyKind, Trajectory
from tools.exchange.framing import Framing, Spoken

FORMATS = ("json", "agenttraj", "sft", "parquet", "atif")
ATIF = "ATIF-v1.7"
FINGERPRINT = "tokenizer"  # Field with the fingerprint of the vocabulary and chat template.
REST = "rest_token_ids"  # Field of ATIF documents: the tokens after the last agent step.
TRAIN_ITEM = "-train-"  # Part of the id of every training item.
ROWS_AT_ONCE = 1_000  # Rows of one write to a Parquet file.
COLUMNS = {  # Types of the Parquet columns, by their names in pyarrow.
    **dict.fromkeys(("episode_id", "group_id", "env", "item_id", "end_reason"), "string"),
    **dict.fromkeys(("segment", "num_segments", "num_turns"), "int32"),
    **{"reward": "float64", "success": "bool_"},
}
LISTS = {"token_ids": "int32", "loss_mask": "bool_", "logprobs": "float32", "versions": "int32"}


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
        return _write_parquet(path, rows)
    record_of = _RECORDS[format]
    num = 0
    with path.open("w", encoding="utf-8") as out:
        for row, number, count, messages in rows:
            record = record_of(row, number, count, messages)
            if record_of in (_sft, _agenttraj):  # The other formats have tokens of their own.
                record |= _tokens(row, framing.fingerprint)
            out.write(json.dumps(record) + "\n")
            num += 1
    return num


_SOURCES = {"assistant": "agent", "system": "system", "user": "user", "tool": "user"}  # ATIF names.
_Row = tuple[Trajectory, int, int, list[Spoken]]  # Segment, its number, their count, messages.


def _rows(episodes: Iterable[Trajectory], framing: Framing) -> Iterator[_Row]:
    """Yield each segment of the exported episodes, with its number and its messages."""
    for episode in filter(_is_exported, episodes):
        parts = as_rows(episode)
        for number, part in enumerate(parts):
            try:
                spoken = framing.messages(part.token_ids, part.loss_mask)
            except ConfigError as error:
                raise ConfigError(f"{episode.episode_id}: {error}") from error
            yield part, number, len(parts), spoken


def _is_exported(episode: Trajectory) -> bool:
    """Return whether an episode was sampled by the model, and may be trained on."""
    is_held_out = episode.kind is EpisodeKind.EVAL and TRAIN_ITEM not in episode.item_id
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
    for each in spoken:
        if each.is_agent:
            messages.append({"from": "gpt", "loss": each.is_sampled, "value": each.text})
        else:
            role = {} if each.role == "user" else {"role": each.role}
            messages.append({"from": "human", "loss": None, "value": each.text, **role})
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
            "role": each.role,
            "content": each.text,
            **({"weight": 0} if each.is_agent and not each.is_sampled else {}),
        }
        for each in messages
    ]


def _atif(row: Trajectory, number: int, count: int, spoken: list[Spoken]) -> dict[str, Any]:
    """Return an ATIF 1.7 document. Its agent steps have the prompt tokens and sampled tokens."""
    found = np.flatnonzero(np.diff(row.loss_mask, prepend=False, append=False))
    edges: list[int] = [int(edge) for edge in found]
    spans = iter(zip(edges[::2], edges[1::2], strict=True))
    steps: list[dict[str, Any]] = []
    for each in spoken:
        step: dict[str, Any] = {"step_id": len(steps) + 1, "message": each.text}
        step["source"] = _SOURCES[each.role]
        if each.is_sampled:
            step["metrics"] = _metrics(row, *next(spans))
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
        raise ConfigError("Parquet needs pyarrow. Install it with: pip install pyarrow") from error


def _write_parquet(path: Path, rows: Iterator[_Row]) -> int:
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
                _sft(*row) | {name: getattr(row[0], name).tolist() for name in LISTS}
                for row in some
            ]
            out.write_table(pa.Table.from_pylist(records, schema=schema))
            num += len(records)
    return num
