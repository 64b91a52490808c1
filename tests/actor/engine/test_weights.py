"""Laws of the actor's line on the weight plane, against a real publisher's router."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from common.store.run_dir import RunDir
from common.wire.security import create_keys
from common.wire.sockets import Router
from common.wire.weight_messages import WeightsJoin, WeightsLeave

HOST = "127.0.0.1"
WAIT_S = 20.0


class Still:
    """An engine that holds version 3 and is asked for nothing."""

    version = 3


@pytest.mark.slow  # importing the engine takes seconds
def test_an_engine_joins_again_and_again_and_says_when_it_leaves(tmp_path: Path) -> None:
    from actor.engine import weights

    keys, run_dir = create_keys(tmp_path / "keys"), RunDir(root=tmp_path)
    router = Router(keys, host=HOST, port=0)
    run_dir.publish_address("weights", f"tcp://{HOST}:{router.port}")

    async def next_message() -> Any:
        async with asyncio.timeout(WAIT_S):
            while True:
                if received := await asyncio.to_thread(router.receive_all, timeout_s=0.1, limit=1):
                    return received[0].message

    async def law() -> None:
        context = zmq.asyncio.Context()
        link = weights.WeightLink(
            run_dir,
            keys,
            Still(),  # type: ignore[arg-type]
            actor="a",
            incarnation="i",
            device="",
            exclusive=asyncio.Lock(),
            context=context,
        )
        await link.connect(timeout_s=WAIT_S)
        task = asyncio.create_task(link.run())
        join = WeightsJoin(actor="a", incarnation="i", device="", version=3)
        assert [await next_message(), await next_message()] == [join, join]
        task.cancel()
        await asyncio.wait([task])
        link.close()
        assert await next_message() == WeightsLeave(actor="a", incarnation="i")
        context.destroy(linger=0)

    asyncio.run(law())
    router.close()
