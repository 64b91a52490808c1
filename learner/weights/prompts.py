"""Prompts that verify an engine's weights: the beginnings of episodes that it sampled."""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from common.segments import segments_of
from common.wire.messages import Trajectory

NUM_PROMPTS = 4
MAX_TOKENS = 96  # Tokens of an episode whose first sampled token is early.
NUM_SAMPLED = 32  # Tokens after the first sampled one, for other episodes.
LATEST_TOKENS = 4096  # Latest position of the first sampled token.
EVERY_S = 1.0  # Seconds between two kept episodes of an actor, because each takes time to copy.
MAX_ACTORS = 64  # Number of actors whose episodes are kept.


class Prompts(NamedTuple):
    """Sequences that trainer and engine both score; only sampled tokens are compared."""

    token_ids: list[list[int]]  # [prompt, seq]
    masks: list[list[bool]]  # [prompt, seq-1] True on sampled tokens


def prompts_of(episodes: Iterable[Trajectory]) -> Prompts:
    """Return the beginnings of at most `NUM_PROMPTS` episodes, each with sampled tokens in it."""
    found = Prompts([], [])
    for episode in episodes:
        sampled = episode.loss_mask[1 : LATEST_TOKENS + 1].nonzero()[0]
        if not len(sampled) or len(found.token_ids) == NUM_PROMPTS:
            continue
        end = max(MAX_TOKENS, int(sampled[0]) + 1 + NUM_SAMPLED)
        end = min(end, segments_of(episode)[0].stop)
        found.token_ids.append(episode.token_ids[:end].tolist())
        found.masks.append(episode.loss_mask[1:end].tolist())
    return found


class RecentPrompts:
    """The latest beginnings of each engine's own episodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_actor: OrderedDict[str, deque[Prompts]] = OrderedDict()
        self._added_at: dict[str, float] = {}

    def add(self, episode: Trajectory) -> None:
        """Keep the beginning of an arrived episode, at most one per actor in `EVERY_S` seconds."""
        now = time.monotonic()
        if now - self._added_at.get(episode.actor, -math.inf) < EVERY_S:
            return
        prompt = prompts_of([episode])
        if not prompt.token_ids:
            return
        with self._lock:
            self._added_at[episode.actor] = now
            self._by_actor.setdefault(episode.actor, deque(maxlen=NUM_PROMPTS)).append(prompt)
            self._by_actor.move_to_end(episode.actor)
            while len(self._by_actor) > MAX_ACTORS:
                self._added_at.pop(self._by_actor.popitem(last=False)[0], None)

    @property
    def is_full(self) -> bool:
        """Whether an actor has as many prompts as are kept."""
        with self._lock:
            return any(len(kept) == NUM_PROMPTS for kept in self._by_actor.values())

    def take(self) -> dict[str, Prompts]:
        """Return the prompts that arrived since the last call, by actor."""
        with self._lock:
            taken = self._by_actor
            self._by_actor = OrderedDict()
            self._added_at = {}
        return {
            actor: Prompts(
                [ids for each in kept for ids in each.token_ids],
                [mask for each in kept for mask in each.masks],
            )
            for actor, kept in taken.items()
        }
