"""The text of a trajectory: its parts in order, with the text and statistics of each token."""

import codecs
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from common import segments as rows
from common.errors import ConfigError
from common.formats.scripted import actions_of
from common.repository import ROOT
from common.segments import Aside
from common.wire.messages import PolicyKind, Trajectory

UNKNOWN_ACTION = "(action not in the journal)"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Texts(Protocol):
    """Decoder of token ids."""

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the joined text of tokens, without special tokens. Raises: ConfigError."""
        ...


class ScriptedTexts:
    """Texts of a scripted policy's actions. Each action is one synthetic token."""

    def __init__(self, actions: Sequence[str]) -> None:
        self._actions = actions

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the action of each token."""
        num = len(self._actions)
        return [self._actions[each] if 0 <= each < num else UNKNOWN_ACTION for each in token_ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the joined text of the actions. Raises: ConfigError: an action is unknown."""
        if not all(0 <= each < len(self._actions) for each in token_ids):
            raise ConfigError(
                "The actions of this policy are not in the journal of an older version."
            )
        return "".join(self.texts(token_ids))


def texts_for(trajectory: Trajectory, texts: Texts) -> Texts:
    """Return the decoder of an episode's tokens; `texts` decodes those of the model."""
    is_model = trajectory.policy is PolicyKind.MODEL
    return texts if is_model else ScriptedTexts(actions_of(trajectory))


def segments_of(trajectory: Trajectory, texts: Texts) -> list[dict[str, Any]]:
    """Return the prompt of each segment, then actions and observations in turn.

    Each part has its `kind`, its `turn` and the `texts` of its tokens. A sampled part also has
    their `logprobs` (nats) and their `versions` as runs [version, number of tokens]. An action also
    has the flag `invalid`. Further kinds are plans, reflections, summaries, and the starts and ends
    of branches.
    """
    t = trajectory
    num = len(t.token_ids)
    starts = {part.start for part in rows.segments_of(t)}
    asides = {first: Aside(kind).name.lower() for first, _, kind in rows.asides_of(t)}
    edges = {*starts, *(np.flatnonzero(np.diff(t.loss_mask)) + 1).tolist(), num}
    # A scripted policy has no observations between its actions.
    if t.policy is not PolicyKind.MODEL:
        edges.update((np.flatnonzero(np.diff(t.turn_ids)) + 1).tolist())
    edges = sorted(edges.union(*(each[:2] for each in rows.asides_of(t))))
    texts = texts_for(t, texts)
    segments: list[dict[str, Any]] = []
    for start, end in itertools.pairwise(edges):
        turn = int(t.turn_ids[start])
        span = slice(start, end)
        observed = "prompt" if start in starts else "observation"
        segment: dict[str, Any] = {
            "kind": asides.get(start) or ("action" if t.loss_mask[start] else observed),
            "turn": turn,
            "start": start,
            "texts": texts.texts(t.token_ids[span].tolist()),
        }
        if t.loss_mask[start]:
            logprobs = np.nan_to_num(np.asarray(t.logprobs[span], np.float64))
            segment["logprobs"] = np.round(logprobs, 4).tolist()
            segment["versions"] = runs_of(t.versions[span])
            is_known = turn < len(t.invalid_turns) and start not in asides
            segment["invalid"] = bool(t.invalid_turns[turn]) if is_known else False
            segment["score"] = float(t.turn_scores[turn]) if is_known else None
        segments.append(segment)
    return segments


def runs_of(values: np.ndarray) -> list[list[int]]:
    """Return [value, length] of each run of equal values."""
    if not len(values):
        return []
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [[int(values[a]), b - a] for a, b in itertools.pairwise(edges)]


class TokenTexts:
    """Decoder of one vocabulary. A character that spans tokens belongs to its last token."""

    _pieces: dict[int, str]

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json. Raises: ConfigError: it is missing or malformed."""
        try:
            settings: Any = json.loads(path.read_bytes())
            vocab: Any = settings["model"]["vocab"]
            added: dict[int, str] = {
                t["id"]: t["content"] for t in settings.get("added_tokens", [])
            }
            if isinstance(vocab, list):  # A unigram model lists [piece, score] by token id.
                listed = cast(list[tuple[str, float]], vocab)
                self._pieces = {number: each[0] for number, each in enumerate(listed)}
            else:
                self._pieces = {number: piece for piece, number in vocab.items()}
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ConfigError(f"{path} is not a valid tokenizer.json ({error!r:.80})") from error
        self._special = {t["id"] for t in settings.get("added_tokens", []) if t.get("special")}
        shape = json.dumps([settings.get("decoder"), settings.get("pre_tokenizer")])
        self._byte_of = _byte_alphabet() if '"ByteLevel"' in shape else None
        self._known: dict[int, bytes] = {number: text.encode() for number, text in added.items()}

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._bytes(number)) for number in token_ids]
        if texts and (rest := decoder.decode(b"", final=True)):
            texts[-1] += rest
        return texts

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the joined text as environments receive it: stripped, without special tokens."""
        return "".join(self.texts([n for n in token_ids if n not in self._special])).strip()

    def _bytes(self, number: int) -> bytes:
        """Return the bytes of a token."""
        content = self._known.get(number)
        if content is None:
            content = self._known[number] = self._decode(number)
        return content

    def _decode(self, number: int) -> bytes:
        """Return the bytes of a piece of the vocabulary."""
        piece = self._pieces.get(number)
        if piece is None:
            return f"⟨{number}⟩".encode()
        if self._byte_of is not None:
            if all(c in self._byte_of for c in piece):
                return bytes(self._byte_of[c] for c in piece)
            return piece.encode("utf-8", "replace")
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode("utf-8", "replace")


class TokenIdDecoder:
    """Decoder for runs without a tokenizer: it shows token ids."""

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each id in brackets."""
        return [f"⟨{number}⟩" for number in token_ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """Raise ConfigError: the actions are unknown without a tokenizer."""
        raise ConfigError("The run's tokenizer is missing, so its actions cannot be decoded.")


def texts_of_run(tokenizer: Path, model: str) -> TokenTexts:
    """Return the decoder of the run's own tokenizer, or else of the model's.

    Args:
        tokenizer: folder of the run's own tokenizer.
        model: `model.path`; "" if it is unknown.

    Raises: ConfigError: neither is there, or it is malformed.
    """
    paths = [tokenizer / "tokenizer.json", *([ROOT / model / "tokenizer.json"] if model else [])]
    return TokenTexts(next((path for path in paths if path.exists()), paths[0]))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable bytes map to themselves; the other bytes map to the characters from 256 on.
    Source: the byte-level BPE of GPT-2 (Radford et al. 2019).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
