"""Laws of the engine and its weights: a real vLLM engine, fed by the learner's real publisher."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from actor.rollout.episode import Turn
from common.errors import WeightSyncError
from common.weights.buckets import BucketLayout, Pending, send_buckets
from common.weights.messages import CanaryScores, WeightsLoaded, WeightsOffer
from common.weights.transport import BroadcastGroup, CollectiveMember
from learner.weights.source import PublishedWeights
from tests.actor.engine.engine_rig import (
    BUCKET_BYTES,
    FIRST_FORCED,
    HOST,
    TIMEOUT_S,
    WAIT_S,
    Rig,
    forked_engines,
)
from tests.common.weights.meeting import NOWHERE, Meeting

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 300  # more than two blocks of the engine's prefix cache
EXACT, ROUNDED = "float32", "bfloat16 tied"  # tied: embedding and head are one tensor
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.005}  # mean |delta logprob|, nats
on_float32 = pytest.mark.parametrize("rig", [EXACT], indirect=True)
on_both = pytest.mark.parametrize(
    "rig", [EXACT, pytest.param(ROUNDED, marks=pytest.mark.long)], indirect=True
)


@pytest.fixture(scope="module")
def rounded_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with forked_engines():
        folder = tmp_path_factory.mktemp("rig")
        rig = Rig(folder, dtype="bfloat16", is_tied=True, is_repeatable=False)
        yield rig
        rig.close()


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    """The exact engine is the one of a synchronous run."""
    return request.getfixturevalue("exact_rig" if request.param == EXACT else "rounded_rig")


def make_prompts(num: int, *, num_tokens: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 260) for _ in range(num_tokens)] for _ in range(num)]


def forced(completion: Turn) -> list[int]:
    """The versions that the sampled tokens themselves name."""
    return [token - FIRST_FORCED for token in completion.token_ids]


def mean_delta(rig: Rig, prompts: list[list[int]], completions: list[Turn]) -> float:
    """Mean |logprob of the engine - logprob of the trainer| over the sampled tokens."""
    sequences = [p + c.token_ids for p, c in zip(prompts, completions, strict=True)]
    deltas = [
        abs(ours - theirs)
        for scores, completion in zip(rig.trainer.score(sequences), completions, strict=True)
        for ours, theirs in zip(
            scores[-len(completion.logprobs) :], completion.logprobs, strict=True
        )
    ]
    return sum(deltas) / len(deltas)


@on_float32
def test_token_versions_match_the_sampling_weights(rig: Rig) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.forced_weights(1))
                running = [
                    rig.generate(f"request-{n}", prompt, max_tokens=180 + 40 * n)
                    for n, prompt in enumerate(make_prompts(8, num_tokens=20))
                ]
                for version in (2, 3):
                    # It runs beside the others, so that all of them sample some tokens first.
                    await rig.generate(f"clock-{version}", [5, 6], max_tokens=10)
                    await asyncio.to_thread(publisher.publish, rig.forced_weights(version))
                completions = await asyncio.gather(*running)
        for number, completion in enumerate(completions):
            assert len(completion.token_ids) == 180 + 40 * number
            assert completion.versions == forced(completion)
        assert {tuple(sorted(set(c.versions))) for c in completions} >= {(1, 2, 3)}

    rig.run(law())


@on_both
def test_engine_logprobs_match_trainer_after_each_update(rig: Rig) -> None:
    limit = LIMITS[rig.dtype]

    async def law() -> None:
        prompts = make_prompts(8, num_tokens=PROMPT_TOKENS)
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                rig.randomize(seed=1)
                await rig.publish_first(publisher, link, rig.weights(1))
                before = await sample(rig, prompts)
                assert mean_delta(rig, prompts, before) <= limit
                rig.randomize(seed=2)
                assert mean_delta(rig, prompts, before) > 40 * limit, "other weights are noticed"
                await asyncio.to_thread(publisher.publish, rig.weights(2))
                after = await sample(rig, prompts)
                assert mean_delta(rig, prompts, after) <= limit
        assert {v for completion in after for v in completion.versions} == {2}

    rig.run(law())


async def sample(rig: Rig, prompts: list[list[int]]) -> list[Turn]:
    """Half of the prompts one by one, half of them in one batch; 64 tokens each."""
    half = len(prompts) // 2
    version = rig.engine.version
    single = [
        rig.generate(f"single-{version}-{n}", prompt, max_tokens=64)
        for n, prompt in enumerate(prompts[:half])
    ]
    alone = await asyncio.gather(*single)
    asked = {f"together-{version}-{n}": prompt for n, prompt in enumerate(prompts[half:])}
    together = await rig.engine.generate_together(
        asked,
        max_tokens=64,
        salt=lambda: f"v{version}",
        seeds={name: n for n, name in enumerate(asked)},
    )
    return [*alone, *together.values()]


@on_float32
def test_prompts_beyond_one_step_follow_their_seeds(rig: Rig) -> None:
    """40 prompts of 300 tokens: a step of vLLM's own ends within one of them.

    A prompt computed in parts takes a draw back from its generator, which none on a CPU can: the
    engine ended.
    """

    async def law() -> None:
        prompts = {f"{n}": each for n, each in enumerate(make_prompts(40, num_tokens=300))}

        async def round_of(salt: str, names: list[str]) -> dict[str, list[int]]:
            turns = await rig.engine.generate_together(
                {f"{salt}:{name}": prompts[name] for name in names},
                max_tokens=8,
                salt=lambda: salt,
                seeds={f"{salt}:{name}": int(name) for name in names},
            )
            return {name.partition(":")[2]: turn.token_ids for name, turn in turns.items()}

        together = await round_of("first", list(prompts))
        assert {len(tokens) for tokens in together.values()} == {8}
        assert await round_of("second", list(prompts)) == together
        alone = await round_of("third", ["7"])
        assert alone["7"] == together["7"]

    rig.run(law())


@on_both
def test_damaged_tensor_raises_the_canary_alarm(rig: Rig) -> None:
    async def law() -> None:
        canary = make_prompts(4, num_tokens=40, seed=1)
        rig.randomize(seed=3)
        with rig.learner() as (publisher, listener):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(1, canary))
                await eventually(lambda: CanaryScores in map(type, listener.heard))
                assert publisher.num_canary_alarms == 0
                spoilt = rig.weights(2, canary, spoil="model.layers.1.mlp.down_proj.weight")
                await asyncio.to_thread(publisher.publish, spoilt)
                await eventually(lambda: publisher.num_canary_alarms == 1)

    rig.run(law())


async def eventually(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds. Raises: TimeoutError: it does not."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.02)


@on_float32
def test_damaged_bucket_leaves_the_old_weights_active(rig: Rig) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.forced_weights(1))
        running = rig.generate("refusing", [5, 6], max_tokens=120)
        await rig.generate("clock", [5, 6], max_tokens=10)
        store = Meeting()
        weights = rig.forced_weights(2)
        offer = offer_of(weights, store)
        sending: list[asyncio.Future[None]] = []
        with pytest.raises(WeightSyncError, match=r"bucket 1 of \d+ \(model.*1 bucket is damaged"):
            await rig.engine.stage(
                offer,
                announce=lambda: sending.append(
                    asyncio.ensure_future(asyncio.to_thread(send_damaged, store, weights, offer))
                ),
            )
        await asyncio.gather(*sending)
        completion = await running
        assert rig.engine.version == 1
        assert completion.versions == forced(completion) == [1] * 120

    rig.run(law())


async def a_round(rig: Rig) -> Turn:
    """Sample a turn as in lockstep."""
    turns = await rig.engine.generate_together(
        {"r": [5, 6]}, max_tokens=5, salt=lambda: "v1", seeds={"r": 1}
    )
    return turns["r"]


@on_float32
def test_partial_update_blocks_sampling_until_complete(rig: Rig) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.forced_weights(1))
                running = [rig.generate("torn", [5, 6], max_tokens=300)]
                await rig.generate("clock", [5, 6], max_tokens=10)
                with pytest.raises(WeightSyncError, match="version 2 was not loaded completely"):
                    await rig.engine.load(offer_of(rig.forced_weights(2), None))
                assert not rig.engine.is_whole
                running.append(rig.generate("later", [5, 6], max_tokens=5))
                running.append(asyncio.create_task(a_round(rig)))
                done, _ = await asyncio.wait(running, timeout=0.5)
                assert not done, "the weights are incomplete"
                await asyncio.to_thread(publisher.publish, rig.forced_weights(3))
                torn, later, together = await asyncio.gather(*running)
        assert torn.versions == forced(torn)
        assert set(torn.versions) == {1, 3}
        assert later.versions == together.versions == forced(later) == [3] * 5

    rig.run(law())


def send_damaged(store: Meeting, weights: PublishedWeights, offer: WeightsOffer) -> None:
    """Send a version; a byte of its bucket 1 changes between its digest and the wire."""
    place = CollectiveMember(0, offer.world_size, "gloo", TIMEOUT_S, HOST)
    group = BroadcastGroup(store.store(), place, epoch=1)
    cut = BucketLayout(offer.total_bytes, offer.bucket_bytes)
    slots = [torch.zeros(cut.slot_bytes, dtype=torch.uint8) for _ in range(2)]
    send_buckets(Damaging(group), cut, slots, weights.source.fill)
    group.close()


class Damaging:
    """A channel with a fault."""

    device = torch.device("cpu")

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group
        self.receive = group.receive

    def send(self, index: int, part: torch.Tensor) -> Pending:
        if index == 1:
            part[7] ^= 1
        return self._group.send(index, part)


@on_float32
@pytest.mark.parametrize("moment", ["before_the_store", "before_the_group", "before_the_broadcast"])
def test_requests_survive_a_learner_lost_mid_transfer(rig: Rig, moment: str) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.forced_weights(1))
        running = [
            rig.generate(f"{moment}-{n}", prompt, max_tokens=120)
            for n, prompt in enumerate(make_prompts(4, num_tokens=20))
        ]
        await rig.generate(f"{moment}-clock", [5, 6], max_tokens=10)
        started = time.monotonic()
        with pytest.raises(WeightSyncError):
            await load_from_a_learner_that_vanishes(rig, moment)
        # torch overshoots the deadline of connecting to a store: 2.6 s for 1 s, 7 s for 3 s.
        max_s = 4 * TIMEOUT_S if moment == "before_the_store" else 2 * TIMEOUT_S
        assert time.monotonic() - started < max_s
        for completion in await asyncio.gather(*running):
            assert completion.versions == forced(completion) == [1] * 120

    rig.run(law())


def offer_of(weights: PublishedWeights, meeting: Meeting | None) -> WeightsOffer:
    return WeightsOffer(
        version=weights.version,
        group_epoch=1,
        rank=1,
        world_size=2,
        **(meeting.of_offer() if meeting else NOWHERE),
        transport="gloo",
        folder="",
        timeout_s=TIMEOUT_S,
        tensors=weights.tensors,
        total_bytes=weights.source.total_bytes,
        bucket_bytes=BUCKET_BYTES,
        canary_token_ids=[],
    )


async def load_from_a_learner_that_vanishes(rig: Rig, moment: str) -> None:
    store = Meeting()
    offer = offer_of(rig.forced_weights(2), store)
    if moment == "before_the_store":
        store.close()

    def join_and_leave() -> None:
        BroadcastGroup(
            store.store(), CollectiveMember(0, 2, "gloo", TIMEOUT_S, HOST), epoch=1
        ).close()

    joining: list[asyncio.Future[None]] = []

    def announce() -> None:
        if moment == "before_the_broadcast":
            joining.append(asyncio.ensure_future(asyncio.to_thread(join_and_leave)))

    try:
        await rig.engine.stage(offer, announce=announce)
    finally:
        await asyncio.gather(*joining)


@on_float32
def test_restarted_learner_is_followed_without_failed_transfer(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.forced_weights(1))
                publisher.stop()
                with rig.learner() as (again, listener):
                    await asyncio.to_thread(again.publish, rig.forced_weights(2))
                    await eventually(lambda: WeightsLoaded in map(type, listener.heard))
        assert rig.engine.version == 2
        assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []

    rig.run(law())
