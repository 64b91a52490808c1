"""The conversations of one episode as a tree of sampled answers. Each leaf is a training row."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actor.api.prompts import continued
from actor.api.requests import Message, PolicyRequest
from actor.rollout.context import Tape, Turn
from common.text import shared_length


@dataclass(slots=True, eq=False)
class Lineage:
    """A sampled answer with the tokens before it: a node of the tree.

    Its tokens are the first `num_shared` tokens of its parent, then `added`.
    """

    parent: "Lineage | None"
    num_shared: int
    added: list[int]  # Tokens of the prompt after the shared ones, then those of the answer.
    taken: Turn  # The answer.
    turn: int  # Turn of the environment's next step.
    messages: list[Message]  # Conversation up to the answer; [] for a bare prompt.
    thoughts: dict[int, str]  # Place of a sampled answer in `messages` -> its thoughts.
    tools: list[dict[str, Any]]
    # Experts of each token of `added`, [layer, chosen]; None: not recorded.
    experts: list[np.ndarray | None]
    row: int = 0
    children: list["Lineage"] = field(default_factory=list["Lineage"])
    is_extended: bool = False  # A child is in the same row.

    @property
    def num_tokens(self) -> int:
        """Number of all tokens of the conversation."""
        return self.num_shared + len(self.added)

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the conversation."""
        parts: list[list[int]] = []
        lineage: Lineage | None = self
        end = self.num_tokens
        while lineage is not None:  # A conversation may be deeper than Python's stack.
            parts.append(lineage.added[: max(0, end - lineage.num_shared)])
            end = min(end, lineage.num_shared)
            lineage = lineage.parent
        return [token_id for part in reversed(parts) for token_id in part]


class Lineages:
    """All conversations of an episode.

    A prompt continues the lineage that has most of its first tokens. The first continuation of a
    whole lineage extends its row. Any other one begins a row that stores only the tokens after the
    shared ones, so that each sampled token is in the loss of exactly one row.

    Example: an agent asks with p and receives a, asks with p a q and receives b, asks with p a r
    and receives c. The rows are [p a q b] and [(p a) r c]; a is trained in the first.
    """

    def __init__(self) -> None:
        """Create a tree without answers."""
        self._roots: list[Lineage] = []
        self._all: list[Lineage] = []
        self._rows: list[list[Lineage]] = []

    def __bool__(self) -> bool:
        """Whether the policy has sampled an answer."""
        return bool(self._all)

    def continued(self, asked: PolicyRequest) -> Lineage | None:
        """Return the longest lineage whose conversation begins the request's; None: there is none.

        A lineage whose row can be extended is preferred among equal ones.
        """
        longest_first = sorted(
            self._all, key=lambda each: (len(each.messages), not each.is_extended), reverse=True
        )
        return next(
            (
                each
                for each in longest_first
                if each.tools == asked.tools and continued(asked, each.messages, each.thoughts)
            ),
            None,
        )

    def add(
        self,
        ids: list[int],
        taken: Turn,
        turn: int,
        *,
        messages: list[Message],
        thoughts: dict[int, str],
        tools: list[dict[str, Any]],
    ) -> Lineage:
        """Add the answer to a prompt.

        Args:
            ids: all tokens of the prompt.
            turn: number of the environment's next step.
            messages, thoughts, tools: as in `Lineage`.
        """
        parent, num_shared = self._longest(ids)
        num_tokens = len(ids) - num_shared + len(taken.token_ids)
        experts: list[np.ndarray | None] = []
        if (chosen := taken.experts) is not None:
            # Rows of copies: those of the turn would keep the record of its whole context.
            experts += [*chosen[num_shared:][:num_tokens].copy()]
            if parent is not None:
                _complete_experts(parent, chosen)
        lineage = Lineage(
            parent=parent,
            num_shared=num_shared,
            added=[*ids[num_shared:], *taken.token_ids],
            taken=replace(taken, experts=None),
            turn=turn,
            messages=messages,
            thoughts=thoughts,
            tools=tools,
            experts=experts + [None] * (num_tokens - len(experts)),
        )
        extends = parent is not None and num_shared == parent.num_tokens and not parent.is_extended
        if parent is not None and extends:
            parent.is_extended = True
            lineage.row = parent.row
            self._rows[lineage.row].append(lineage)
        else:
            lineage.row = len(self._rows)
            self._rows.append([lineage])
        (self._roots if parent is None else parent.children).append(lineage)
        self._all.append(lineage)
        return lineage

    def _longest(self, ids: list[int]) -> tuple[Lineage | None, int]:
        """Return the lineage with most of the first tokens, and their number."""
        best: tuple[Lineage | None, int] = None, 0
        best_rank = 0, False
        for lineage, num in self._matches(ids):
            rank = num, num == lineage.num_tokens and not lineage.is_extended
            if rank > best_rank:
                best = lineage, num
                best_rank = rank
        return best

    def _matches(self, ids: list[int]) -> Iterator[tuple[Lineage, int]]:
        """Yield the lineages that begin as the tokens do, parents first, and the shared number."""
        waiting = deque(self._roots)
        while waiting:
            lineage = waiting.popleft()
            added = lineage.added
            start = lineage.num_shared
            rest = ids[start : start + len(added)]
            num = start + (len(added) if rest == added else shared_length(rest, added))
            yield lineage, num
            waiting += [child for child in lineage.children if child.num_shared <= num]

    def tape(self, *, last_turn: int) -> Tape:
        """Return the rows of all leaves.

        Args:
            last_turn: the turn of all tokens that were sampled after it.
        """
        tape = Tape()
        for number, row in enumerate(self._rows):
            first = row[0]
            if number:
                tape.starts.append(tape.num_tokens)
            tape.prefixes += [first.parent.row if first.parent else 0, first.num_shared]
            for lineage in row:
                turn = min(lineage.turn, last_turn)
                num_prompt = len(lineage.added) - len(lineage.taken.token_ids)
                start = tape.num_tokens
                tape.observe(lineage.added[:num_prompt], turn)
                tape.add(lineage.taken, turn)
                recorded = enumerate(lineage.experts, start)
                tape.experts.update((at, chosen) for at, chosen in recorded if chosen is not None)
        return tape


def _complete_experts(parent: Lineage, chosen: np.ndarray) -> None:
    """Record the experts of a parent's tokens that have none, such as its last one.

    The engine chooses the experts of a token when it samples the next one.

    Args:
        chosen: experts of the tokens of a continuation's prompt.
    """
    for at in range(len(parent.experts)):
        place = parent.num_shared + at
        if parent.experts[at] is None and place < len(chosen):
            parent.experts[at] = chosen[place].copy()
