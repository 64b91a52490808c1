"""Laws of playing given items, against a real small hub."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from actor.agents.agents import Agents
from actor.formats.renderer import Renderer
from actor.rollout.episode import ContextFull, OnTokens, PolicyFailed, Turn
from common.config.actor import ActorSection
from common.errors import ConfigError, LongstrideError
from common.wire.messages import EndReason, EpisodeKind, Trajectory
from learner.journal.journal import read_journal
from tests.actor.formats.test_renderer import TOKENIZERS
from tests.actor.rollout.playing import Letters
from tests.actor.toy_servers import ToyHub, serve
from tools.evaluate.play import EpisodePlayer, PlannedEpisode, PlayJob, play

TOKENIZER = TOKENIZERS["chatml"]


def plan(number: int, *, name: str = "") -> PlannedEpisode:
    item_id = f"a-test-{number}"
    return PlannedEpisode(
        episode_id=name or f"p/{number}", env="toy", item_id=item_id, seed=0, horizon=3
    )


class Going:
    """Answers "go" and counts concurrent requests; raises `raises` instead if given."""

    def __init__(self, raises: Exception | None = None) -> None:
        self._raises = raises
        self.num_at_once = 0
        self.most_at_once = 0

    async def act(self, _: list[int], session: Any, /, on_tokens: OnTokens | None = None) -> Turn:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0.01)
        self.num_at_once -= 1
        if self._raises is not None:
            raise self._raises
        return Turn([ord("g"), ord("o")], [0.0, 0.0], [0, 0])


def played(
    folder: Path,
    plans: list[PlannedEpisode],
    *,
    going: Going | None = None,
    hub: ToyHub | None = None,
    max_concurrent: int = 4,
    agents: Agents | None = None,
    **patience: Any,
) -> list[Trajectory]:
    """Play into a journal at `folder` and return what it holds."""
    act = (going or Going()).act
    player = EpisodePlayer(
        policy=lambda _: (act, Letters()),
        max_concurrent=max_concurrent,
        max_tokens=100,
        turn_tokens=2,
        agents=agents,
    )
    with serve((hub or ToyHub()).app()) as url:
        job = PlayJob(
            plans=plans,
            hub_url=url,
            token=None,
            env_timeout_s=10.0,
            style="compact",
            episode_timeout_s=60.0,
            journal=folder,
            **patience,
        )

        async def to_the_end() -> None:
            await play(job, player)
            if agents is not None:
                await agents.close()

        asyncio.run(to_the_end())
    return [trajectory for _, trajectory in read_journal(folder)]


def test_every_plan_runs_once_within_max_concurrent(tmp_path: Path) -> None:
    going = Going()
    ended = played(tmp_path, [plan(i) for i in range(6)], going=going, max_concurrent=2)
    assert sorted(t.episode_id for t in ended) == [f"p/{i}" for i in range(6)]
    assert {(t.end_reason, t.reward, t.num_turns) for t in ended} == {(EndReason.DONE, 1.0, 2)}
    assert going.most_at_once == 2


def test_failed_environment_is_retried_and_recorded_once(tmp_path: Path) -> None:
    hub = ToyHub()
    (failed,) = played(tmp_path, [plan(9)], hub=hub, max_attempts=3)
    assert hub.opened == ["a-test-9"] * 3
    assert (failed.end_reason, failed.attempt, failed.reward) == (EndReason.ENV_ERROR, 2, 0.0)
    assert "the game is broken" in failed.error


def test_failed_policy_counts_as_infrastructure_failure(tmp_path: Path) -> None:
    (failed,) = played(tmp_path, [plan(1)], going=Going(PolicyFailed("no answer")))
    assert failed.end_reason is EndReason.ABORTED
    assert failed.end_reason.is_infrastructure_failure
    assert failed.error == "no answer"


def test_full_context_ends_a_counted_episode(tmp_path: Path) -> None:
    (ended,) = played(tmp_path, [plan(1)], going=Going(ContextFull()))
    assert ended.end_reason is EndReason.CONTEXT_FULL
    assert not ended.end_reason.is_infrastructure_failure


def test_playing_ends_when_too_many_episodes_failed(tmp_path: Path) -> None:
    hub = ToyHub(is_broken=True)
    plans = [plan(i % 10, name=f"p/{i}") for i in range(40)]
    with pytest.raises(LongstrideError, match="3 episodes had infrastructure failures"):
        played(tmp_path, plans, hub=hub, max_concurrent=1, max_failed=2)
    assert len(list(read_journal(tmp_path))) == 3


def test_wrong_configuration_ends_playing_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^policy\.model=x$"):
        played(tmp_path, [plan(1), plan(2)], going=Going(ConfigError("policy.model=x")))


def test_journal_holds_played_episodes_as_evaluation(tmp_path: Path) -> None:
    kept = played(tmp_path, [plan(1), plan(2)])
    assert sorted(t.episode_id for t in kept) == ["p/1", "p/2"]
    assert {t.kind for t in kept} == {EpisodeKind.EVAL}


ONE_SAYING = """
import json, os
from urllib.request import Request, urlopen
def call(url, body):
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    with urlopen(Request(url, json.dumps(body).encode(), {"Authorization": key})) as answer:
        return json.load(answer)
messages = [{"role": "user", "content": "my own way"}]
reply = call(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
call(os.environ["LONGSTRIDE_ENV"] + "/step", {"action": "go"})
"""


def test_given_episodes_run_through_the_agent_loop(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    class Noted(Going):
        async def act(self, ids: list[int], session: Any) -> Turn:
            asked.append(ids)
            return Turn(TOKENIZER.encode("go"), [0.0], [0], is_stopped=False)

    command = [sys.executable, "-c", ONE_SAYING]
    renderer = Renderer(TOKENIZER)
    agents = Agents(ActorSection(endpoint=True, agent=command), actor="play", renderer=renderer)
    ended = played(tmp_path, [plan(1), plan(2)], going=Noted(), agents=agents)
    assert asked == [renderer.first_prompt("my own way")] * 2
    assert {(t.end_reason, t.num_turns) for t in ended} == {(EndReason.DONE, 1)}


@pytest.mark.slow
def test_paused_environment_delays_an_episode_and_fails_none(tmp_path: Path) -> None:
    """It is paused at one opening, and at the first step of the second session."""
    hub = ToyHub(num_paused=2)
    (trajectory,) = played(tmp_path, [plan(1)], hub=hub, max_attempts=1)
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.DONE, 1.0)
    assert (trajectory.num_turns, hub.num_paused, len(hub.opened)) == (2, 0, 2)
