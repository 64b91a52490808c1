"""Tokens that end a turn: those of the chat template, and those of the model's configuration."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from common.errors import ConfigError
from common.text import shared_length

GENERATION_CONFIG = "generation_config.json"


def configured_ends(tokenizer: Any) -> list[int]:
    """Return the ends of a turn in the tokenizer and its folder's generation_config.json, in order.

    Raises: ConfigError: the file is damaged, or an end is no token id.
    """
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    path = Path(str(getattr(tokenizer, "name_or_path", "") or ".")) / GENERATION_CONFIG
    if getattr(tokenizer, "name_or_path", "") and path.is_file():
        ends += _ends_in(path)
    return list(dict.fromkeys(ends))


def _ends_in(path: Path) -> list[int]:
    """Return the ends of a turn in a generation_config.json. Raises: ConfigError."""
    try:
        settings = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8-sig")))
        ends = settings.get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: is not JSON with an object: {error}") from error
    listed = cast(list[object], ends if isinstance(ends, list) else [ends])
    wrong = [each for each in listed if each is not None and type(each) is not int]
    if wrong:
        raise ConfigError(f"{path}: eos_token_id={wrong[0]!r}: must be a token id or a list")
    return [each for each in listed if type(each) is int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The tokens with which a template ends an answer before the next message."""

    lead: Sequence[int]  # Tokens before them: whitespace, or an end of the answer's own parts.
    run: Sequence[int]  # The tokens of the end, in order.
    last: Sequence[int] = ()  # Tokens that stand there if the conversation ends with the answer.

    def num_sampled(self, end: int | None, *, is_stopped: bool) -> int:
        """Return the number of tokens of the text after an answer that its end stands for.

        Args:
            end: the sampled token that ended the answer; None: the template's first one.
            is_stopped: the answer ended with such a token.
        """
        if not is_stopped:
            return 0
        if end is None:
            return len(self.lead) + 1
        if end in self.run:
            return len(self.lead) + self.run.index(end) + 1
        return len(self.lead) + len(self.run) if end in self.last else 0


def find_end(
    after: Sequence[int],
    last: Sequence[int],
    special: Collection[int],
    is_blank: Callable[[int], bool],
    inner: Collection[int] = (),
) -> TurnEnd | None:
    """Return the end of a turn; None: no special token ends it.

    Args:
        after: tokens of the template from an answer to the next message.
        last: tokens of the template after an answer that ends the conversation.
        special: ids of the special tokens.
        is_blank: returns whether the text of a token is whitespace.
        inner: special tokens that also stand inside of an answer. The end is another one, if the
            template has one.
    """
    num_lead = next((i for i, each in enumerate(after) if not is_blank(each)), len(after))
    if num_lead == len(after) or after[num_lead] not in special:
        return None
    end = after[num_lead:]
    shared = end[: shared_length(end, [each for each in last if not is_blank(each)])]
    num_run = max((i + 1 for i, each in enumerate(shared) if each in special), default=1)
    first = next((i for i, each in enumerate(shared) if each in special and each not in inner), 0)
    ends = [each for each in last if each in special and each not in inner][:1]
    return TurnEnd(
        lead=list(after[: num_lead + first]), run=list(end[first : max(num_run, 1)]), last=ends
    )
