"""Canary prompts: compare the log-probabilities of an engine with those of the trainer.

`RecentPrompts` keeps prompts for checks without a new version: the beginnings of episodes that the
engine sampled.
"""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.segments import segments_of
from common.weights.messages import CanaryScores
from common.wire.messages import Trajectory

if TYPE_CHECKING:  # The import would load the policy into processes that only keep prompts.
    from learner.weights.source import PublishedWeights

logger = logging.getLogger(__name__)

NUM_PROMPTS = 4
MAX_TOKENS = 96  # Tokens of an episode whose first sampled token is early.
NUM_SAMPLED = 32  # Tokens after the first sampled one, for other episodes.
LATEST_TOKENS = 4096  # Latest position of the first sampled token.
EVERY_S = 1.0  # Seconds between two kept episodes of an actor, because each takes time to copy.
MAX_ACTORS = 64  # Number of actors whose episodes are kept.
MIN_TOKENS = 8  # Tokens needed to estimate the noise.
SURE = 4.0  # Number of standard errors for significance.
# Rounding moves the share of a small step from 1 to about a half, as the trainer's own scores err.
MAX_STALE_SHARE = 0.25
# The usual difference of an engine is the mean of its first comparisons. A larger model with more
# layers in bf16 has a larger one.
NUM_USUAL = 3
FACTOR = 4.0  # An alarm is raised at this multiple of the usual difference.
# Bounds of the limit as multiples of `learner.max_canary_delta`: the first limit, before anything
# was measured, then the lowest and the highest limit.
FIRST = 2.0
FLOOR = 0.4
CAP = 4.0
KEPT_VERSIONS = 4  # Versions kept, because an engine may answer late.


class Prompts(NamedTuple):
    """Sequences that trainer and engine both score; only sampled tokens are compared."""

    token_ids: list[list[int]]  # [prompt, seq]
    masks: list[list[bool]]  # [prompt, seq-1] True on sampled tokens


def prompts_of(episodes: Iterable[Trajectory]) -> Prompts:
    """Return the beginnings of at most `NUM_PROMPTS` episodes, each with sampled tokens in it."""
    prompts = Prompts([], [])
    for episode in episodes:
        sampled = episode.loss_mask[1 : LATEST_TOKENS + 1].nonzero()[0]
        if not len(sampled) or len(prompts.token_ids) == NUM_PROMPTS:
            continue
        end = max(MAX_TOKENS, int(sampled[0]) + 1 + NUM_SAMPLED)
        end = min(end, segments_of(episode)[0].stop)
        prompts.token_ids.append(episode.token_ids[:end].tolist())
        prompts.masks.append(episode.loss_mask[1:end].tolist())
    return prompts


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
                [ids for prompt in prompts for ids in prompt.token_ids],
                [mask for prompt in prompts for mask in prompt.masks],
            )
            for actor, prompts in taken.items()
        }


class _Expected(NamedTuple):
    """The canaries of one version, kept without its weights."""

    token_ids: list[list[int]]  # [canary, seq]
    logprobs: list[list[float]]  # [canary, seq-1] nats
    masks: list[list[bool]]  # [canary, seq-1]


class Limits:
    """The limit of each engine's mean |difference|, relative to its usual one.

    Example (max_delta .05): the first limit is .1. An engine differs by .042, .045 and .039: its
    limit is 4 x .042 = .168. Another one differs by .002: its limit is the floor, .02.
    """

    def __init__(self, max_delta: float) -> None:
        self._max_delta = max_delta
        self._measured: dict[str, list[float]] = {}  # First differences in nats, by actor.

    def of(self, actor: str) -> float:
        """Return an engine's limit in nats."""
        measured = self._measured.get(actor)
        if not measured:
            return FIRST * self._max_delta
        usual = FACTOR * sum(measured) / len(measured)
        return min(CAP * self._max_delta, max(FLOOR * self._max_delta, usual))

    def note(self, actor: str, delta: float) -> None:
        """Record a comparison without an alarm; only the first ones count."""
        measured = self._measured.setdefault(actor, [])
        if len(measured) < NUM_USUAL:
            measured.append(delta)


class Canary:
    """Compares the engines' scores with the trainer's, and counts consecutive disagreements."""

    def __init__(self, *, max_delta: float) -> None:
        """Start without versions; `max_delta` in nats scales the engines' limits."""
        self._limits = Limits(max_delta)
        self._expected: dict[int, _Expected] = {}  # Canaries by version.
        # Number of the check -> actor, version, canaries.
        self._checks: dict[int, tuple[str, int, _Expected]] = {}
        self._num_checks = 0
        self._alarms: dict[str, int] = {}  # Consecutive alarms, by actor name.
        # Largest mean |difference| in nats since the last drain, by actor name.
        self._worst: dict[str, float] = {}
        self._lock = threading.Lock()

    def expect(self, weights: "PublishedWeights") -> None:
        """Keep the canaries of a new version, and drop those of old versions."""
        oldest = weights.version - KEPT_VERSIONS
        self._expected = {v: w for v, w in self._expected.items() if v > oldest}
        self._expected[weights.version] = _Expected(
            weights.canary_token_ids, weights.canary_logprobs, weights.masks
        )

    def expect_check(
        self, actor: str, version: int, prompts: Prompts, logprobs: list[list[float]]
    ) -> int:
        """Register an additional check of an engine; return the number to send with it."""
        self._num_checks += 1
        expected = _Expected(prompts.token_ids, logprobs, prompts.masks)
        self._checks = {n: kept for n, kept in self._checks.items() if kept[0] != actor}
        self._checks[self._num_checks] = (actor, version, expected)
        return self._num_checks

    def compare(self, scores: CanaryScores) -> None:
        """Compare an engine's scores with the trainer's of the same version."""
        if scores.number:
            asked = self._checks.pop(scores.number, None)
            is_answer = asked is not None and asked[:2] == (scores.actor, scores.version)
            expected = asked[2] if asked and is_answer else None
            before = None
        else:
            expected = self._expected.get(scores.version)
            before = None if expected is None else self._before(scores.version)
        if expected is None or not expected.logprobs:
            return
        delta = _mean_delta(expected.logprobs, scores.logprobs, expected.masks)
        is_stale = False
        if before is not None and not math.isnan(delta):
            is_stale = _is_stale(expected, before, scores.logprobs)
        limit = self._limits.of(scores.actor)
        is_alarm = is_stale or not delta <= limit  # NaN is an alarm.
        if not is_alarm:
            self._limits.note(scores.actor, delta)
        with self._lock:
            self._worst[scores.actor] = max(delta, self._worst.get(scores.actor, delta))
            self._alarms[scores.actor] = self._alarms.get(scores.actor, 0) + 1 if is_alarm else 0
        if is_alarm:
            logger.error(
                "logprobs of engine and trainer differ%s actor=%s version=%d mean_abs_logprob=%.4f"
                " limit=%.4f",
                " (the engine has the version before)" if is_stale else "",
                scores.actor,
                scores.version,
                delta,
                limit,
            )

    def _before(self, version: int) -> _Expected | None:
        """Return the canaries of the newest older version, if they have the same tokens."""
        older = max((v for v in self._expected if v < version), default=None)
        before = None if older is None else self._expected[older]
        return before if before and before.token_ids == self._expected[version].token_ids else None

    @property
    def num_alarms(self) -> int:
        """Largest number of consecutive alarms of an engine."""
        with self._lock:
            return max(self._alarms.values(), default=0)

    @property
    def worst_engine(self) -> str:
        """The actor with the most consecutive alarms; "" if there is none."""
        with self._lock:
            return max(self._alarms, key=lambda actor: self._alarms[actor], default="")

    def drain_metrics(self) -> dict[str, float]:
        """Return the largest differences since the last call, and the number of alarms.

        With several engines, each has a difference of its own: its numeric noise. The engine and
        the trainer score with the same version, so no lag is part of it.
        """
        with self._lock:
            worst = self._worst
            self._worst = {}
        name = "weights/canary_abs_logprob"
        measured = {name: max(worst.values())} if worst else {}
        if len(self._alarms) > 1:
            measured |= {f"{name}/{actor}": delta for actor, delta in worst.items()}
        return measured | {"weights/canary_alarms": float(self.num_alarms)}


def _is_stale(now: _Expected, before: _Expected, theirs: list[list[float]]) -> bool:
    """Return whether the scores are significantly closer to the version before.

    The scores are modelled as before + share * (now - before) + noise. The share is 1 if the new
    version has arrived and 0 if it has not, even for a small change of the weights. The standard
    error of the share follows from the residuals.
    """
    rows = zip(before.logprobs, now.logprobs, theirs, now.masks, strict=True)
    compared = [
        [(a, b, c) for a, b, c, is_compared in zip(*row, strict=True) if is_compared]
        for row in rows
        if len({len(part) for part in row}) == 1
    ]
    numbers = np.array([part for row in compared for part in row], dtype=np.float64)  # [token, 3]
    if len(numbers) < MIN_TOKENS:
        return False
    step = numbers[:, 1] - numbers[:, 0]
    moved = numbers[:, 2] - numbers[:, 0]
    size = float(step @ step)
    if size == 0:
        return False
    share = float(step @ moved) / size
    error = float(np.std(moved - share * step)) / math.sqrt(size)
    return share + SURE * error < MAX_STALE_SHARE


def _mean_delta(
    ours: list[list[float]], theirs: list[list[float]], masks: list[list[bool]]
) -> float:
    """Return the mean |difference| in nats; NaN if the rows differ in shape or no token counts."""
    if [len(row) for row in ours] != [len(row) for row in theirs] or not any(ours):
        return math.nan
    deltas = [
        abs(a - b)
        for our_row, their_row, mask in zip(ours, theirs, masks, strict=True)
        for a, b, is_compared in zip(our_row, their_row, mask, strict=True)
        if is_compared
    ]
    return sum(deltas) / len(deltas) if deltas else math.nan
