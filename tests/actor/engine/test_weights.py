"""Laws of the actor's line on the weight plane, against a real socket."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.wire.weight_messages import WeightsJoin, WeightsLeave
from tests.actor.links.toy_peer import Peer, check, make_weight_link

if TYPE_CHECKING:  # importing the engine takes seconds
    from actor.engine.weights import WeightLink


class Still:
    """An engine that holds version 3 and is asked for nothing."""

    version = 3
    quiet_s = 0.0


@pytest.mark.slow
def test_an_engine_joins_again_and_again_and_says_when_it_leaves(tmp_path: Path) -> None:
    async def law(learner: Peer, link: "WeightLink", task: asyncio.Task[None]) -> None:
        join = WeightsJoin(actor="a", incarnation="i", devices=[""], version=3, host="127.0.0.1")
        assert [each.message for each in await learner.receive(2, timeout_s=20.0)] == [join, join]
        task.cancel()
        await asyncio.wait([task])
        link.close()
        assert (await learner.next()).message == WeightsLeave(actor="a", incarnation="i")

    check(tmp_path, "weights", lambda *line: make_weight_link(*line, engine=Still()), law)
