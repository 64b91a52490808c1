"""Law of a judge that is down: its environment waits at a real hub, and nothing else does."""

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from actor.rollout.hubs import Hubs
from common.config.actor import ActorSection
from common.errors import EnvPaused
from common.wire.messages import EndReason, HubPlace
from tests.actor.rollout.test_hubs import Box, lease_of, start_episodes
from tests.envhub.envs.dataset.judges.judge_server import JudgeServer, serving
from tests.envhub.envs.dataset.made import GSM8K, make
from tests.envhub.envs.dataset.test_episodes import serving as serving_hub
from tests.ports import free_port

NUM = 3


def health(url: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/healthz") as answer:
        return json.loads(answer.read())


async def play_through_an_outage(url: str, judge: JudgeServer, port: int, box: Box) -> None:
    """Play at a hub whose judge is down, comes up, and refuses one episode in its middle."""
    places = [HubPlace(url=url, token="", envs=["dataset", "rooms"])]
    hubs = Hubs(lambda: places, ActorSection(episode_timeout_s=300.0), style="compact")
    await hubs.start()
    try:
        while "paused" not in await asyncio.to_thread(health, url):  # The first probe.
            await asyncio.sleep(0.01)
        with pytest.raises(EnvPaused, match=r"judge judge .* does not answer"):
            await hubs.open("dataset", "data-train-0", seed=0)
        assert hubs.absent() == ["dataset"]
        assert hubs.waiting_for == ""  # The other environment is playable.
        other = await hubs.open("rooms", "Carry-train-0", seed=0)
        await other.close()
        episodes = start_episodes(hubs, box, 0)
        ids = [f"data-train-{i}" for i in range(NUM)]
        leases = [
            replace(lease_of(i), env="dataset", item_id=item_id) for i, item_id in enumerate(ids)
        ]
        episodes.start(leases)
        while len(episodes._waiting) < NUM:
            await asyncio.sleep(0.01)
        assert health(url)["paused"] == ["dataset"]
        assert episodes.num_free_slots == episodes.num_slots
        # The judge answers the probe and two episodes. It refuses one, which is played again.
        judge.answers = ["Score: 1", "Score: 7", "Score: 7", 503, "Score: 7"]
        with serving(judge, port=port):
            while episodes.running_ids:
                await asyncio.sleep(0.01)
    finally:
        await hubs.close()


@pytest.mark.slow
def test_judge_that_is_down_pauses_only_its_environment(tmp_path: Path) -> None:
    judge = JudgeServer("")
    port = free_port()
    entry = {"url": f"http://127.0.0.1:{port}/v1", "model": "m", "retries": 0}
    options = replace(make(tmp_path, reward={"judge": entry}), run_dir=str(tmp_path / "run"))
    box = Box()
    with serving_hub(options, "dataset", "rooms") as url:
        asyncio.run(play_through_an_outage(url, judge, port, box))
        assert "paused" not in health(url)
    assert len(box.taken) == NUM == len(GSM8K)
    assert {each.end_reason for each in box.taken} == {EndReason.DONE}
    assert [each.reward for each in box.taken] == [pytest.approx(0.7)] * NUM
    metrics = [each.metrics for each in box.taken]
    assert sum(each["reward_judge_calls"] for each in metrics) == NUM
    assert sum(each["reward_judge_unanswered"] for each in metrics) >= 1
