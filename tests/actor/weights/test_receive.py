"""Laws of the actor's line on the weight plane, against a real socket."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from common.config.actor import ActorSection
from common.errors import WeightSyncError
from common.weights.messages import WeightsJoin, WeightsLeave, WeightsLoaded
from common.weights.node_copy import CopyUnreachable, node_id
from tests.actor.toy_peer import Peer, check, make_weight_link
from tests.common.weights.test_transport import offer_of

if TYPE_CHECKING:  # importing the engine takes seconds
    from actor.weights.receive import WeightLink


class Still:
    """An engine that holds version 3 and is asked for nothing."""

    version = 3
    quiet_s = 0.0


@pytest.mark.slow
def test_engine_repeats_join_and_announces_leave(tmp_path: Path) -> None:
    async def law(learner: Peer, link: "WeightLink", task: asyncio.Task[None]) -> None:
        join = WeightsJoin(
            actor="a", incarnation="i", devices=[""], version=3, host="127.0.0.1", node=node_id()
        )
        assert [each.message for each in await learner.receive(2, timeout_s=20.0)] == [join, join]
        task.cancel()
        await asyncio.wait([task])
        link.close()
        assert (await learner.next()).message == WeightsLeave(actor="a", incarnation="i")

    check(tmp_path, "weights", lambda *line: make_weight_link(*line, engine=Still()), law)


class Apart(Still):
    """An engine that cannot open the memory of another one."""

    can_sample = True

    async def stage(self, *_: Any, **__: Any) -> float:
        raise CopyUnreachable("the memory of another worker cannot be opened")


@pytest.mark.slow
def test_engine_that_cannot_share_joins_without_a_node(tmp_path: Path) -> None:
    async def law(learner: Peer, _: "WeightLink", __: asyncio.Task[None]) -> None:
        joined = await learner.next(WeightsJoin)
        assert joined.message.node == node_id()
        learner.answer(joined, offer_of(None, epoch=1, rank=1))
        loaded = await learner.next(WeightsLoaded)
        assert not loaded.message.is_ok
        assert (await learner.next(WeightsJoin)).message.node == ""

    check(tmp_path, "weights", lambda *line: make_weight_link(*line, engine=Apart()), law)


class Workers:
    """A tensor-parallel engine's workers, of which the second received something else."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def init_weight_transfer_engine(self, _: Any) -> None: ...

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        from actor.weights.stage import Staged

        self.asked.append(method)
        good, bad = Staged(is_done=True), Staged(is_done=True, error="bucket 1 of 2 is damaged")
        return [good.as_dict(), bad.as_dict()]


@pytest.mark.slow
def test_version_missing_on_one_worker_is_refused() -> None:
    from actor.engine.engine import Engine

    workers, ready = Workers(), []
    watch: Any = None
    engine = Engine(cast(Any, workers), ActorSection(), end_of_turn_ids=[], watch=watch)
    offer = offer_of(None, epoch=1, rank=1)
    with pytest.raises(WeightSyncError, match=r"^bucket 1 of 2 is damaged$"):
        asyncio.run(engine.stage(offer, announce=lambda: ready.append(True)))
    assert ready == [True]
    assert workers.asked == ["staged", "give_up_staging"], "the others do not wait for it"
    assert engine.is_whole
