"""Laws of canaries: they alarm when a version did not arrive, however little it changed."""

import numpy as np
import pytest
import torch

from common.weights.messages import CanaryScores
from learner.weights.canary import Canary, Limits, _Expected, _is_stale
from tests.learner.builders import snapshot

CANARIES = [[1, 2, 3] * 20, [4, 5] * 15]
NOISE = 0.005  # nats: the engine's rounding, a tenth of the limit
RNG = np.random.default_rng(0)


def scores(*, scale: float = 1.0) -> list[np.ndarray]:
    return [RNG.normal(0.0, scale, len(ids) - 1) for ids in CANARIES]


def published(version: int, logprobs: list[np.ndarray], token_ids: list[list[int]] = CANARIES):
    return snapshot(
        version,
        [("weight", torch.ones(4))],
        canary_token_ids=token_ids,
        canary_logprobs=[row.tolist() for row in logprobs],
    )


def answer(version: int, logprobs: list[np.ndarray]) -> CanaryScores:
    noisy = [row + RNG.normal(0.0, NOISE, len(row)) for row in logprobs]
    return CanaryScores(actor="a", version=version, logprobs=[row.tolist() for row in noisy])


@pytest.mark.parametrize("change", [0.0, 1e-4, 0.002, 0.01, 0.04])
def test_engine_with_the_current_version_raises_no_alarm(change: float) -> None:
    canary = Canary(max_delta=0.05)
    now = scores()
    for version in range(60):
        now = [row + d for row, d in zip(now, scores(scale=change), strict=True)]
        canary.expect(published(version, now))
        canary.compare(answer(version, now))
        assert canary.num_alarms == 0


@pytest.mark.parametrize("change", [0.01, 0.04])
def test_engine_one_version_behind_alarms_below_the_limit(change: float) -> None:
    canary = Canary(max_delta=0.05)
    before, num_steps = scores(), 5
    canary.expect(published(0, before))
    for version in range(1, num_steps + 1):
        now = [row + d for row, d in zip(before, scores(scale=change), strict=True)]
        canary.expect(published(version, now))
        canary.compare(answer(version, before))
        before = now
    assert canary.num_alarms == num_steps
    measured = canary.drain_metrics()["weights/canary_abs_logprob"]
    assert measured < 0.05


def test_each_of_several_engines_has_its_own_difference() -> None:
    canary = Canary(max_delta=0.05)
    now = scores()
    canary.expect(published(1, now))
    for actor, noise in [("bf16", 0.02), ("fp32", 0.001)]:
        rows = [(row + noise).tolist() for row in now]
        canary.compare(CanaryScores(actor=actor, version=1, logprobs=rows))
    metrics = canary.drain_metrics()
    name = "weights/canary_abs_logprob"
    assert metrics[name] == pytest.approx(0.02)
    assert metrics[f"{name}/bf16"] == pytest.approx(0.02)
    assert metrics[f"{name}/fp32"] == pytest.approx(0.001)


def test_new_prompts_are_compared_with_their_own_scores() -> None:
    canary = Canary(max_delta=0.05)
    before = scores()
    canary.expect(published(1, before))
    now = [row + d for row, d in zip(before, scores(scale=0.04), strict=True)]
    canary.expect(published(2, now, token_ids=[[9] * len(ids) for ids in CANARIES]))
    canary.compare(answer(2, before))
    assert canary.num_alarms == 0


# Mean |difference| in nats, recorded on a GPU: a tiny model, 0.5B in bf16, 7B with LoRA in bf16.
TINY = [0.002, 0.006, 0.004]
HALF = [0.009, 0.008, 0.010]
SEVEN = [0.042, 0.045, 0.039]


@pytest.mark.parametrize(
    ("usual", "limit"),
    [
        (TINY, 0.020),  # 4 x .004 is below the floor, .4 x .05.
        (HALF, 0.036),
        (SEVEN, 0.168),
        ([0.07], 0.200),  # 4 x .07 is above the cap, 4 x .05.
        ([], 0.100),  # Nothing was measured yet: 2 x .05.
    ],
)
def test_limit_follows_the_usual_difference_of_an_engine(usual: list[float], limit: float) -> None:
    limits = Limits(0.05)
    limits.note("other", 0.001)
    for delta in usual:
        limits.note("a", delta)
    limits.note("other", 0.001)
    assert limits.of("a") == pytest.approx(limit)


def test_later_differences_do_not_move_the_limit() -> None:
    limits = Limits(0.05)
    for delta in [*SEVEN, 0.16, 0.16, 0.16]:
        limits.note("a", delta)
    assert limits.of("a") == pytest.approx(0.168)


@pytest.mark.parametrize(
    ("usual", "wrong"), [(TINY, 0.025), (HALF, 0.045), (SEVEN, 0.24), ([], 0.24)]
)
def test_engine_alarms_at_a_multiple_of_its_own_difference(
    usual: list[float], wrong: float
) -> None:
    canary = Canary(max_delta=0.05)
    now = scores()
    for version, delta in enumerate([*usual, wrong]):
        canary.expect(published(version, now))
        canary.compare(shifted(version, now, delta))
        assert canary.num_alarms == (version == len(usual))


def shifted(version: int, logprobs: list[np.ndarray], delta: float) -> CanaryScores:
    """Scores that differ by `delta` at each token, up and down in turn."""
    moved = [row + delta * (1 - 2 * (np.arange(len(row)) % 2)) for row in logprobs]
    return CanaryScores(actor="a", version=version, logprobs=[row.tolist() for row in moved])


def test_rounding_of_a_small_step_is_not_an_older_version() -> None:
    numbers = np.random.default_rng(0)
    exact = -np.abs(numbers.normal(size=512))  # The step itself changes nothing.
    older, newer = (
        [(exact + scale * numbers.normal(size=512)).tolist()] for scale in (0.003, 0.004)
    )
    masks = [[True] * 512]
    before, now = (_Expected([list(range(513))], rows, masks) for rows in (older, newer))
    assert not _is_stale(now, before, [exact.tolist()])
    assert _is_stale(now, before, older)
