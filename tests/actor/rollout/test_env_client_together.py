"""Laws of the requests that go to a hub together: steps, openings and ends of quick episodes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actor.rollout import env_client
from actor.rollout.batches import AnswerTooLarge
from actor.rollout.env_client import Environments, HubClient, HubSession, HubStepResult
from common.errors import EnvError, EnvTimeout, HubLost
from tests.actor.rollout.test_env_client import Hub, check


def quick_steps(*actions: str) -> Callable[[HubClient], Awaitable[list[Any]]]:
    """Return what asks at the same time for a step in as many sessions, and returns what came."""

    async def ask(client: HubClient) -> list[Any]:
        toy = await Environments.of(client, style="compact")
        sessions = [await toy.open("toy", "item", seed=0) for _ in actions]
        steps = [each.step(action) for each, action in zip(sessions, actions, strict=True)]
        return await asyncio.gather(*steps, return_exceptions=True)

    return ask


def test_concurrent_quick_steps_share_one_request() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        answers = await quick_steps("a", "b", "c")(client)
        told = {"observation": "on", "reward": 1.0, "done": True, "is_valid": False}
        assert answers == [HubStepResult(**told, is_success=True)] * 3

    hub = check(law)
    paths = [path for _, path, _ in hub.requests]
    assert paths == ["/v1/envs", *["/v1/sessions"] * 3, "/v1/step/batch"]
    assert [each["action"] for each in hub.requests[-1][2]] == ["a", "b", "c"]


def test_quick_sessions_open_and_close_in_batches() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        toy = await Environments.of(client, style="compact")
        asked = ["a", "unknown", "b", "full"]
        opened = await asyncio.gather(
            *(toy.open("toy", item, seed=0) for item in asked), return_exceptions=True
        )
        kinds = [HubSession, EnvError, HubSession, HubSession]
        assert [type(each) for each in opened] == kinds  # HubLost would be asked elsewhere
        assert "HTTP 404 unknown item" in str(opened[1])
        await asyncio.gather(*(each.close() for each in opened if isinstance(each, HubSession)))
        (alone,) = [await toy.open("toy", "c", seed=0)]
        await alone.close()

    hub = check(law)
    asked = [(method, path) for method, path, _ in hub.requests]
    ends = ("POST", "/v1/sessions"), ("DELETE", "/v1/sessions/s")
    assert asked == [
        ("GET", "/v1/envs"),
        ("POST", "/v1/sessions/batch"),
        ("POST", "/v1/sessions"),  # A session refused by a full hub waits alone.
        ("POST", "/v1/close/batch"),
        *ends,  # A single session uses the plain routes.
    ]
    assert hub.requests[3][2] == [{"session_id": "s"}] * 3


def test_hub_without_batch_close_gets_single_closes() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        toy = await Environments.of(client, style="compact")
        opened = [await toy.open("toy", "item-a", seed=0) for _ in range(2)]
        await asyncio.gather(*(each.close() for each in opened))

    hub = check(law, script=(200, 200, 200, 404))
    assert [method for method, _, _ in hub.requests][3:] == ["POST", "DELETE", "DELETE"]


def test_session_opened_for_cancelled_episode_is_closed() -> None:
    async def law(hub: Hub, client: HubClient) -> None:
        toy = await Environments.of(client, style="compact")
        opening = [asyncio.create_task(toy.open("toy", item, seed=0)) for item in "ab"]
        while len(hub.requests) < 2:
            await asyncio.sleep(0)
        opening[0].cancel()
        await opening[1]
        async with asyncio.timeout(60.0):
            while len(hub.requests) < 3:
                await asyncio.sleep(0.01)

    hub = check(law)
    assert [method for method, _, _ in hub.requests] == ["GET", "POST", "DELETE"]


def test_session_opened_during_client_close_is_closed() -> None:
    async def law(hub: Hub, client: HubClient) -> None:
        toy = await Environments.of(client, style="compact")
        opening = asyncio.create_task(toy.open("toy", "item-a", seed=0))
        while len(hub.requests) < 2:
            await asyncio.sleep(0)
        opening.cancel()  # as by the end of an evaluation

    hub = check(law)
    assert [method for method, _, _ in hub.requests] == ["GET", "POST", "DELETE"]


def test_failed_step_in_a_batch_fails_alone() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        first, gone, slow = await quick_steps("a", "gone", "slow")(client)
        assert isinstance(first, HubStepResult)
        assert type(gone) is HubLost
        assert "HTTP 404 no such session" in str(gone)
        assert type(slow) is EnvTimeout

    check(law)


def test_broken_batch_is_retried_with_same_numbers() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        answers = await quick_steps("a", "b")(client)
        assert [type(each) for each in answers] == [HubStepResult, HubStepResult]

    hub = check(law, script=(200, 200, 200, "lost"))
    assert hub.requests[-1] == hub.requests[-2]


def test_refused_batch_marks_no_step_done() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        answers = await quick_steps("a", "b")(client)
        assert [type(each) for each in answers] == [EnvError, EnvError]

    check(law, script=(200, 200, 200, 500))


@pytest.mark.parametrize("answer", [b"null", b"{}", b"[]", b"[1, 2]", b'[{"status": "ok"}, {}]'])
def test_malformed_batch_answer_fails_immediately(answer: bytes) -> None:
    async def law(_: Hub, client: HubClient) -> None:
        answers = await quick_steps("a", "b")(client)
        assert [type(each) for each in answers] == [EnvError, EnvError]

    check(law, script=(200, 200, 200, answer))


def test_oversized_page_fails_only_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_client, "MAX_ANSWER_BYTES", 400)
    large = b'[{"observation": "%s"}]' % (b"x" * 1_000)

    async def law(_: Hub, client: HubClient) -> None:
        kinds = [type(each) for each in await quick_steps("a", "large", "c")(client)]
        assert kinds == [HubStepResult, AnswerTooLarge, HubStepResult]

    # The batch, its halves "a" and "large" with "c", and the halves of the latter.
    hub = check(law, script=(*[200] * 4, large, 200, large, large))
    batches = [
        [each["action"] for each in body] for _, path, body in hub.requests if "/step" in path
    ]
    assert batches == [["a", "large", "c"], ["a"], ["large", "c"], ["large"], ["c"]]
