"""Laws of agents' keys: a key opens its own episode only, while that episode runs."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actor.agents.http import AgentRequest
from actor.agents.keys import EpisodeKeys, RefusalLog
from actor.agents.server import AgentServer
from actor.api.requests import ApiError
from tests.actor.agents.endpoint import ByHeart, endpoint, new_episode
from tests.actor.rollout.playing import LEASE

ASKED = {"messages": [{"role": "user", "content": "Which way?"}]}
CHAT = "/v1/chat/completions"
OTHER = replace(LEASE, episode_id="g/2")


def test_wrong_or_foreign_or_expired_key_is_401_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> list[str]:
        async with endpoint(ByHeart(["go"])) as at:
            other, _ = new_episode(ByHeart(["go"]), lease=OTHER)
            with at.server.serving(other):
                for key in ("wrong", "", at.episode.key[:-1], "\u00e4"):
                    status, told = await at.post(CHAT, ASKED, key=key.encode().decode("latin-1"))
                    assert (status, told["error"]["code"]) == (401, "invalid_api_key")
                status, told = await at.post(f"/episode/g.1{CHAT}", ASKED, key=other.key)
                assert (status, told["error"]["code"]) == (401, "invalid_api_key")
                assert "does not belong to the episode g.1" in told["error"]["message"]
                assert (await at.post(f"/episode/g.2{CHAT}", ASKED, key=other.key))[0] == 200
            status, told = await at.post(CHAT, ASKED, key=other.key)
            assert (status, told["error"]["code"]) == (401, "episode_ended")
            assert sum(other.tape().loss_mask) > 0
            assert not at.tape.token_ids
            other.failed.cancel()
            return [at.episode.key, other.key]

    keys = asyncio.run(run())
    for reason, episode in (("unknown", "none"), ("key of another", "g/2"), ("expired", "g/2")):
        lines = [each for each in caplog.messages if f"reason={reason}" in each]
        assert len(lines) == 1
        assert f"key_of_episode={episode} " in lines[0]
        assert f"request=POST {CHAT} peer=127.0.0.1" in lines[0]
    assert not any(key in caplog.text for key in keys)


def test_described_urls_name_the_episode_of_their_key() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"])) as at:
            told: dict[str, Any] = at.server.describe(at.episode)
            for name, path in (
                ("base_url", "/chat/completions"),
                ("anthropic_url", "/v1/chat/completions"),
            ):
                assert told[name].startswith(f"{at.server.url}/episode/g.1")
                path = f"{told[name]}{path}".removeprefix(at.server.url)
                assert (await at.post(path, ASKED))[0] == 200
            step = f"{told['env_url']}/step".removeprefix(at.server.url)
            assert (await at.post(step, {"action": "go"}))[0] == 200

    asyncio.run(run())


def test_restarted_actor_refuses_the_keys_of_before() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"])) as at:
            restarted = AgentServer()
            await restarted.start()
            key = at.episode.key
            try:
                headers = {"authorization": f"Bearer {key}"}
                for path, body in ((CHAT, ASKED), ("/env/step", {"action": "go"})):
                    url = restarted.url + path
                    async with at.http.post(url, json=body, headers=headers) as reply:
                        assert reply.status == 401
            finally:
                await restarted.close()

    asyncio.run(run())


def test_keys_are_random_for_each_episode() -> None:
    async def run() -> None:
        episodes = [new_episode(ByHeart(["go"]))[0] for _ in range(3)]
        assert len({each.key for each in episodes}) == 3
        assert all(len(each.key) == 32 for each in episodes)  # 24 bytes in base64.
        for episode in episodes:
            episode.failed.cancel()

    asyncio.run(run())


def request_of(key: str = "") -> AgentRequest:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "GET", "raw_path": b"/v1/models", "headers": headers}
    return AgentRequest({**scope, "client": ("10.0.0.9", 5)})


def test_refusals_of_one_reason_are_logged_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = [0.0]
    log = RefusalLog(lambda: clock[0])
    request = request_of()
    for now in (0.0, 1.0, 9.9, 10.0):
        clock[0] = now
        log.add(request, "unknown key")
    assert [each.rpartition("=")[2] for each in caplog.messages] == ["1", "4"]


def test_number_of_remembered_ended_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actor.agents.keys.NUM_ENDED", 2)

    async def run() -> None:
        keys = EpisodeKeys()
        episodes = [new_episode(ByHeart(["go"]))[0] for _ in range(3)]
        for episode in episodes:
            keys.add(episode)
            keys.remove(episode)
            episode.failed.cancel()
        request = request_of(episodes[0].key)
        with pytest.raises(ApiError, match="belongs to no episode"):
            keys.access(request)
        assert [keys.has_ended(each.key) for each in episodes] == [False, True, True]

    asyncio.run(run())
