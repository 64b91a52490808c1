"""Laws of the role that an actor names while its episodes wait: a real pool, hub and agent."""

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest

from actor.agents.agents import Agents
from actor.rollout.context import Turn
from actor.rollout.hubs import Hubs
from actor.rollout.lockstep import Rounds
from actor.rollout.pool import FOR_AGENTS, EpisodePool
from common.config.actor import AgentLifetime
from common.wire.messages import EndReason, PolicyKind
from tests.actor.agents.programs import RENDERER, act, settings
from tests.actor.agents.test_long_lived import ONE_BY_ONE, SERVE
from tests.actor.rollout.test_hubs import Box, lease_of, place, play, start_episodes
from tests.actor.toy_servers import ToyHub, serve

SILENT = SERVE + "take()\nimport time\ntime.sleep(600)\n"
DEADLINE_S = 4.0


async def states_until_the_end(episodes: EpisodePool) -> set[str]:
    """Return the waits of a pool until its episodes have ended."""
    seen: set[str] = set()
    while episodes.running_ids:
        seen.add(episodes.waiting_for)
        await asyncio.sleep(0.005)
    return seen


@pytest.mark.slow
def test_silent_agent_is_waited_for_until_its_deadline() -> None:
    hub, box = ToyHub(), Box()
    command = (sys.executable, "-c", SILENT)
    cfg = settings(*command, agent_lifetime=AgentLifetime.RUN, env_timeout_s=60.0)
    lease = replace(lease_of(0, deadline_s=DEADLINE_S), policy=PolicyKind.MODEL)

    async def law(hubs: Hubs) -> None:
        no_engine: Any = None
        episodes = EpisodePool(
            cfg,
            actor="a",
            engine=no_engine,
            renderer=RENDERER,
            environments=hubs,
            delivery=box,  # type: ignore[arg-type]
            rounds=None,
            agents=Agents(cfg, actor="a", renderer=RENDERER),
        )
        assert episodes.waiting_for == "scheduler: leases"
        episodes.start([lease])
        seen = await states_until_the_end(episodes)
        assert FOR_AGENTS in seen
        assert seen <= {FOR_AGENTS, "envhub"}
        assert (episodes.num_ended, episodes.waiting_for) == (1, "scheduler: leases")
        await episodes.cancel_all()

    with serve(hub.app()) as url:
        play([place(url)], law)
    assert [each.end_reason for each in box.taken] == [EndReason.DEADLINE]


def test_unanswered_step_is_a_wait_for_the_hub() -> None:
    hub, box = ToyHub(step_s=0.1), Box()

    async def law(hubs: Hubs) -> None:
        episodes = start_episodes(hubs, box, 2)
        seen = await states_until_the_end(episodes)
        assert "envhub" in seen
        assert seen <= {"envhub", ""}
        assert hubs.num_in_flight == 0

    with serve(hub.app()) as url:
        play([place(url)], law)
    assert len(box.taken) == 2


class TogetherEngine:
    """Samples the turns of a round as `act` does."""

    version = 3

    async def generate_together(self, prompts: dict[str, list[int]], **_: Any) -> dict[str, Turn]:
        no_session: Any = None
        return {name: await act(ids, no_session) for name, ids in prompts.items()}


def test_rounds_wait_for_no_episode_that_waits_for_a_busy_agent() -> None:
    hub, box = ToyHub(), Box()
    command = (sys.executable, "-c", SERVE + ONE_BY_ONE)
    cfg = settings(*command, agent_lifetime=AgentLifetime.RUN, num_agents=1)
    leases = [replace(lease_of(number), policy=PolicyKind.MODEL) for number in range(4)]

    async def law(hubs: Hubs) -> None:
        engine: Any = TogetherEngine()
        to: Any = box
        episodes = EpisodePool(
            cfg,
            actor="a",
            engine=engine,
            renderer=RENDERER,
            environments=hubs,
            delivery=to,
            rounds=Rounds(engine, max_tokens=12, exclusive=asyncio.Lock()),
            agents=Agents(cfg, actor="a", renderer=RENDERER),
        )
        episodes.start(leases)
        async with asyncio.timeout(40.0):
            await states_until_the_end(episodes)
        await episodes.cancel_all()

    with serve(hub.app()) as url:
        play([place(url)], law)
    assert sorted(each.member for each in box.taken) == [0, 1, 2, 3]
    assert {each.end_reason for each in box.taken} <= {EndReason.DONE, EndReason.HORIZON}
