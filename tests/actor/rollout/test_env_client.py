"""Laws of the hub's client, against a tiny real server that fails on demand."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from actor.api.listening import stop_accepting
from actor.rollout import env_client
from actor.rollout.batches import failure_of, route_of
from actor.rollout.env_client import Environments, ExpertHint, HubClient, HubStepResult
from common.errors import EnvError, EnvTimeout, HubLost

OPENED = {"session_id": "s", "observation": "begun"}
STEPPED = {"observation": "on", "reward": 1, "done": True, "is_valid": False}


class Hub:
    """Answers by its script: a status, "lost" (the connection breaks) or "hangs".

    A request beyond the script succeeds.
    """

    def __init__(self) -> None:
        self.is_still = False
        self.num_signs = 0
        self.script: list[int | str | bytes] = []  # bytes: the body of a good answer
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[Any] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body))
        self.headers.append(request.headers)
        number = len(self.requests) - 1
        act = self.script[number] if number < len(self.script) else 200
        if act == "lost":
            assert request.transport is not None
            request.transport.abort()
        if act == "hangs":
            await asyncio.sleep(30.0)
        if request.path.startswith("/v1/presence/"):
            return await self.give_signs(request)
        if isinstance(act, bytes):
            return web.Response(body=act, content_type="application/json")
        if act == 429:
            return web.Response(status=429, headers={"Retry-After": "0.01"})
        if act != 200:
            return web.json_response(
                {"detail": "what happened"}, status=act if isinstance(act, int) else 500
            )
        if request.method == "DELETE":
            return web.Response(status=204)
        if request.path == "/v1/envs":
            toy = {"instruction": {"compact": "play"}, "is_quick": True}
            return web.json_response({"toy": toy})
        if request.path == "/v1/step/batch":
            statuses = {"gone": 404, "slow": 504}
            answers = [statuses.get(each["action"], 200) for each in body or []]
            return web.json_response(
                [STEPPED | {"status": n, "detail": "no such session"} for n in answers]
            )
        if request.path == "/v1/sessions/batch":
            full = {"status": 429, "detail": "the hub is full"}
            unknown = {"status": 404, "detail": "unknown item"}
            known = {"full": full, "unknown": unknown}
            return web.json_response(
                [known.get(each["item_id"], {"status": 201, **OPENED}) for each in body or []]
            )
        if request.path == "/v1/close/batch":
            return web.json_response([{"status": 204} for _ in body or []])
        if request.path.endswith("/hint"):
            return web.json_response({"valid_actions": ["a"], "expert_action": None})
        return web.json_response(STEPPED if request.path.endswith("/step") else OPENED)

    async def give_signs(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            if not self.is_still:
                await response.write(b"\n")
                self.num_signs += 1
            await asyncio.sleep(0.02)


Law = Callable[[Hub, HubClient], Awaitable[None]]


def check(law: Law, *, script: tuple[int | str | bytes, ...] = (), timeout_s: float = 60.0) -> Hub:
    """Run a law against a served hub."""
    hub = Hub()
    hub.script = list(script)

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hub.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        port = runner.addresses[0][1]
        try:
            async with HubClient(
                f"http://127.0.0.1:{port}/", token="secret", timeout_s=timeout_s
            ) as client:
                await law(hub, client)
        finally:
            await stop_accepting([listener.fileno()])
            await runner.cleanup()

    asyncio.run(run())
    return hub


async def play_one(_: Hub, client: HubClient) -> None:
    session = await client.open("toy", "toy-train-0", seed=3, style="compact")
    assert session.first_observation == "begun"
    result = await session.step("go")
    told = {"observation": "on", "reward": 1.0, "done": True, "is_valid": False}
    assert result == HubStepResult(**told, is_success=True)  # Third-party hubs may omit it.
    assert await session.hint() == ExpertHint(valid_actions=["a"], expert_action=None)
    await session.close()


@pytest.mark.parametrize(("reward", "is_success"), [(0.9, True), (1, False)])
def test_success_comes_from_the_hub(
    reward: float, is_success: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"reward": reward, "is_success": is_success}
    monkeypatch.setitem(globals(), "STEPPED", STEPPED | told)

    async def law(_: Hub, client: HubClient) -> None:
        session = await client.open("toy", "toy-train-0", seed=3, style="compact")
        result = await session.step("go")
        assert (result.reward, result.is_success) == (reward, is_success)

    check(law)


@pytest.mark.parametrize(("told", "score"), [({}, 0.0), ({"start_score": 0.5}, 0.5)])
def test_start_score_defaults_to_zero(
    told: dict[str, float], score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "OPENED", OPENED | told)

    async def law(_: Hub, client: HubClient) -> None:
        for is_quick in (False, True):
            session = await client.open("toy", "item-a", seed=3, style="compact", is_quick=is_quick)
            assert session.start_score == score

    check(law)


def test_out_of_range_start_score_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OPENED", OPENED | {"start_score": 1.5})

    async def law(_: Hub, client: HubClient) -> None:
        with pytest.raises(EnvError, match=r"start_score=1\.5, which is not in \[0, 1\]"):
            await client.open("toy", "item-a", seed=3, style="compact")

    check(law)


def test_client_opens_steps_and_closes_an_episode() -> None:
    hub = check(play_one)
    opened = {"env": "toy", "item_id": "toy-train-0", "seed": 3, "style": "compact"}
    assert hub.requests == [
        ("POST", "/v1/sessions", opened),
        ("POST", "/v1/sessions/s/step", {"action": "go", "seq": 1}),
        ("GET", "/v1/sessions/s/hint", None),
        ("DELETE", "/v1/sessions/s", None),
    ]
    assert {headers["Authorization"] for headers in hub.headers} == {"Bearer secret"}


def test_lost_connection_retries_the_same_step_number() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        session = await client.open("toy", "toy-train-0", seed=0, style="compact")
        await session.step("first")
        await session.step("second")

    hub = check(law, script=(200, "lost", 200, 200))
    assert [body for _, path, body in hub.requests if path.endswith("/step")] == [
        {"action": "first", "seq": 1},
        {"action": "first", "seq": 1},
        {"action": "second", "seq": 2},
    ]


def test_full_hub_is_retried_longer_than_broken() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        await client.open("toy", "toy-train-0", seed=0, style="compact")

    assert len(check(law, script=(429,) * 9).requests) == 10


@pytest.mark.slow
def test_permanently_full_hub_raises_a_timeout() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        with pytest.raises(EnvTimeout, match="full"):
            await client.open("toy", "toy-train-0", seed=0, style="compact")

    check(law, script=(429,) * 1000, timeout_s=3.0)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (504, EnvTimeout, "what happened"),
        (500, EnvError, "HTTP 500.*what happened"),
        (404, HubLost, "HTTP 404"),
        (409, EnvError, "HTTP 409"),
    ],
)
def test_hub_refusal_raises_without_retry(status: int, error: type[EnvError], text: str) -> None:
    async def law(_: Hub, client: HubClient) -> None:
        session = await client.open("toy", "toy-train-0", seed=0, style="compact")
        with pytest.raises(EnvError, match=text) as raised:
            await session.step("go")
        assert type(raised.value) is error

    assert len(check(law, script=(200, status)).requests) == 2


def test_errors_of_two_sessions_have_the_same_text() -> None:
    failures = [
        failure_of("POST", path, 500, "no levels")
        for path in ("/v1/sessions/x1y2/step", "/v1/sessions/Zz-9_0/step")
    ]
    assert [*map(str, failures)] == ["POST /v1/sessions/ID/step: HTTP 500 no levels"] * 2
    assert route_of("POST", "/v1/sessions/step") == "POST /v1/sessions/step"


def test_silent_hub_raises_a_timeout() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        with pytest.raises(EnvTimeout, match=r"no answer within 0\.1 s"):
            await client.open("toy", "toy-train-0", seed=0, style="compact")

    check(law, script=("hangs",), timeout_s=0.1)


@pytest.mark.parametrize(
    ("is_still", "timeout_s"), [(True, 0.3), pytest.param(False, 5.0, marks=pytest.mark.slow)]
)
def test_stalled_hub_is_lost_not_timed_out(
    is_still: bool, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub answers again after the step is cancelled, like a resumed process."""
    monkeypatch.setattr(env_client, "PROBE_S", 60.0)

    async def law(hub: Hub, client: HubClient) -> None:
        staying = asyncio.create_task(client.stay())
        while not hub.num_signs:
            await asyncio.sleep(0.01)
        hub.script = [200, "hangs"]  # of the presence, of the session
        hub.is_still = is_still
        await asyncio.sleep(0.1)  # Earlier signs arrive; no event reports them.
        with pytest.raises(HubLost if is_still else EnvTimeout) as caught:
            await client.open("toy", "toy-train-0", seed=0, style="compact")
        assert type(caught.value) is (HubLost if is_still else EnvTimeout)
        assert await client.answers()
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)

    check(law, timeout_s=timeout_s)


@pytest.mark.slow
def test_unreachable_hub_raises_after_few_tries() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        with pytest.raises(EnvError, match="4 tries"):
            await client.open("toy", "toy-train-0", seed=0, style="compact")

    assert len(check(law, script=("lost",) * 4).requests) == 4


@pytest.mark.parametrize("status", [404, 500, 504])
def test_closing_a_missing_session_succeeds(status: int) -> None:
    async def law(_: Hub, client: HubClient) -> None:
        session = await client.open("toy", "toy-train-0", seed=0, style="compact")
        await session.close()

    check(law, script=(200, status))


def test_session_close_waits_for_a_lost_hub() -> None:
    async def law(hub: Hub, client: HubClient) -> None:
        session = await client.open("toy", "toy-train-0", seed=0, style="compact")
        client.is_lost = True
        num_before = len(hub.requests)
        await session.close()
        assert len(hub.requests) == num_before
        await client.close_left()
        assert len(hub.requests) == num_before + 1
        await client.close_left()
        assert len(hub.requests) == num_before + 1

    check(law)


def test_instructions_depend_on_environment_and_style() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        environments = await Environments.of(client, style="compact")
        assert environments.instruction("toy") == "play"

    check(law)


HALF = b"half \\ud83d"  # as JSON writes it


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[]",
        b"null",
        b"{}",
        b'{"observation": null, "reward": 0, "done": false, "is_valid": true}',
        b'{"observation": "a", "reward": NaN, "done": false, "is_valid": true}',
        b'{"observation": "a", "reward": -1, "done": false, "is_valid": true}',
        b'{"observation": "a", "reward": 1' + b"0" * 4000 + b', "done": false, "is_valid": true}',
        b'{"observation": "a", "reward": "1", "done": false, "is_valid": true}',
        b'{"observation": "a", "reward": 1, "done": "no", "is_valid": true}',
    ],
)
def test_malformed_hub_answer_raises_env_error(answer: bytes) -> None:
    async def law(_: Hub, client: HubClient) -> None:
        with pytest.raises(EnvError):
            await client.open("toy", "toy-train-0", seed=0, style="compact")
        session = await client.open("toy", "toy-train-0", seed=0, style="compact")
        with pytest.raises(EnvError):
            await session.step("go")
        with pytest.raises(EnvError):
            await session.hint()

    check(law, script=(answer, 200, answer, answer))


def test_lone_surrogates_from_a_hub_are_tolerated() -> None:
    async def law(_: Hub, client: HubClient) -> None:
        session = await client.open("toy", "toy-train-0", seed=0, style="compact")
        result = await session.step("go")
        assert result.observation == "half \ud83d", "an episode counts it when it takes it up"
        hint = await session.hint()
        assert (hint.valid_actions, hint.expert_action) == (["half \ufffd"], "half \ufffd")
        with pytest.raises(EnvError, match="HTTP 500"):
            await session.step("go")

    opened = b'{"session_id": "/../%s", "observation": "begun"}' % HALF
    stepped = b'{"observation": "%s", "reward": 1, "done": false, "is_valid": true}' % HALF
    hint = b'{"valid_actions": ["%s"], "expert_action": "%s"}' % (HALF, HALF)
    hub = check(law, script=(opened, stepped, hint, 500))
    assert hub.requests[1][1] == "/v1/sessions//../half \ufffd/step"


def test_endless_hub_answer_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_client, "MAX_ANSWER_BYTES", 1000)

    async def law(_: Hub, client: HubClient) -> None:
        with pytest.raises(EnvError, match="more than 1000 bytes"):
            await client.open("toy", "toy-train-0", seed=0, style="compact")

    check(law, script=(b'"' + b"x" * 5000,))


@pytest.mark.parametrize(
    ("told", "wait_s"), [("3", 3.0), ("-1", 1.0), ("nan", 1.0), ("inf", 1.0), ("soon", 1.0)]
)
def test_retry_after_always_parses_to_seconds(told: str, wait_s: float) -> None:
    assert env_client.retry_after_s({"Retry-After": told}, default_s=1.0) == wait_s
