"""Laws of the instances on AgentGym servers: lost, late, out of order, and given back."""

import asyncio
import contextlib
from typing import cast

import pytest

from envhub.catalogue.registry import Registry
from envhub.env import EnvFailure, EnvSpec, Isolation
from envhub.hosting.sessions import EpisodeFactory
from tests.envhub.agentgym.agentgym_stubs import Counted, Stub
from tests.envhub.agentgym.driving import drive, made, opened, spec_of, stop


def test_episode_fails_when_a_restarted_server_reassigns_its_instance():
    server = Counted()

    async def play(spec: EnvSpec) -> None:
        before = await opened(spec, 1)
        server.start_anew()
        after = await opened(spec, 2)
        with pytest.raises(EnvFailure, match="instance 0 is lost; the server was restarted"):
            await before.step("Action: inventory")
        await before.close()
        assert (await after.step("Action: inventory")).observation == "0 plays 2"
        await after.close()

    drive(server.app, "textcraft", play)
    assert server.items == {}


def test_instances_are_reused_on_a_server_without_close():
    server = Counted(has_close=False)

    async def play(spec: EnvSpec) -> None:
        for index in range(4):
            env = await opened(spec, index)
            assert (await env.step("Action: inventory")).observation == f"0 plays {index}"
            await env.close()

    drive(server.app, "textcraft", play)
    assert server.num_asked == 1


@pytest.mark.slow
def test_late_instance_is_kept_for_the_next_episode():
    server = Counted()
    server.create_s = 1.8

    async def play(spec: EnvSpec) -> None:
        with pytest.raises(EnvFailure, match=r"wait for an instance took more than 1\.2 s"):
            await opened(spec, 0)
        env = await opened(spec, 1)
        assert (await env.step("Action: inventory")).observation == "0 plays 1"
        await env.close()

    drive(server.app, "textcraft", play, timeout_s=1.2)
    assert server.num_asked == 1


@pytest.mark.parametrize(("dialect", "max_at_once"), [("webshop", 1), ("sqlgym", 3)])
def test_instances_are_created_serially_where_create_blocks_the_server(dialect, max_at_once):
    server = Counted()
    server.create_s = 0.05

    async def play(spec: EnvSpec) -> None:
        await asyncio.gather(*(opened(spec, index) for index in range(3)))

    drive(server.app, dialect, play)
    assert (server.num_asked, server.max_at_once) == (3, max_at_once)


def test_create_repeats_until_a_full_server_frees_an_instance():
    server = Counted(max_instances=8)

    async def play(spec: EnvSpec) -> None:
        envs = [await opened(spec, index) for index in range(8)]
        server.fault = True
        with pytest.raises(EnvFailure):
            await envs[5].step("SELECT 1")
        await envs[5].close()
        server.fault = False
        another = await opened(spec, 9)
        assert (await another.step("SELECT 1")).observation.startswith("5 plays")

    drive(server.app, "sqlgym", play)


def test_each_request_opens_a_new_connection():
    ended: list[asyncio.Event] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        mine = ended[-1]
        request = await reader.readuntil(b"\r\n\r\n")
        body = b"0" if b"/create" in request else b'"question"'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        await reader.read(1000)
        writer.transport.abort()  # The answer did not announce the close.
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        mine.set()

    async def play() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            spec = spec_of("weather", f"http://127.0.0.1:{port}")
            env = await opened(spec, 0)
            await env.close()
            await stop(spec)
            await asyncio.gather(*(each.wait() for each in ended))

    asyncio.run(play())
    assert len(ended) == 3  # create, reset, observation


def test_missing_item_costs_no_instance():
    stub = Stub("alfworld")

    async def play(spec: EnvSpec) -> None:
        for index in (0, 13, 1, 13, 13, 2):
            env = made(spec)
            if index == 13:
                with pytest.raises(EnvFailure, match="no such file"):
                    await env.reset("all-train-13", 0)
            else:
                await env.reset(f"all-train-{index}", 0)
            await env.close()

    drive(stub.app, "alfworld", play)
    assert stub.num_created == 1


def test_forgotten_idle_instances_are_each_replaced():
    stub = Stub("alfworld")

    async def play(spec: EnvSpec) -> None:
        envs = [await opened(spec, index) for index in range(3)]
        for env in envs:
            await env.close()
        stub.num_created = 0
        for env in [await opened(spec, index) for index in range(3)]:
            assert not (await env.step("Action: look")).is_valid
            await env.close()

    drive(stub.app, "alfworld", play)
    assert stub.num_created == 3


def test_unreadable_webarena_action_becomes_an_observation():
    stub = Stub("webarena")

    async def play(spec: EnvSpec) -> None:
        env = await opened(spec, 0)
        result = await env.step("I do ``````")
        assert (result.observation, result.reward) == ("list index out of range", 0.0)
        assert (result.is_valid, result.done) == (False, False)
        assert (await env.step("I do ```stop [x]```")).done
        await env.close()

    drive(stub.app, "webarena", play)


@pytest.mark.parametrize(
    ("stop_timeout_s", "stop_s", "is_ended"), [(0.02, 50.0, False), (50.0, 0.02, True)]
)
def test_environment_stop_takes_up_to_its_own_timeout(stop_timeout_s, stop_s, is_ended):
    ended: list[bool] = []

    async def take_time() -> None:
        await asyncio.sleep(stop_s)
        ended.append(True)

    spec = EnvSpec(
        name="slow",
        subsets={},
        instruction={},
        make=lambda _: pytest.fail("nobody plays it"),
        isolation=Isolation.TASK,
        stop=take_time,
        stop_timeout_s=stop_timeout_s,
    )

    class One:
        def loaded(self) -> list[EnvSpec]:
            return [spec]

    registry = cast(Registry, One())
    asyncio.run(EpisodeFactory(registry, capacity=1, step_timeout_s=1.0).stop())
    assert bool(ended) is is_ended


def test_webarena_timeouts_cover_its_slow_close():
    spec = spec_of("webarena", "http://127.0.0.1:9", timeout_s=60.0)
    assert spec.stop_timeout_s > 30  # its server gives up after 30 s, and needs 5 s at least
    assert spec.step_timeout_s is not None
    assert spec.step_timeout_s > 90


def test_failed_reset_closes_no_idle_instance():
    stub = Stub("webarena")

    async def play(spec: EnvSpec) -> None:
        envs = [await opened(spec, index) for index in range(3)]
        for env in envs:
            await env.close()
        with pytest.raises(EnvFailure, match="cannot reset item 13"):
            await opened(spec, 13)

    drive(stub.app, "webarena", play)
    assert stub.num_created == 4  # item 13 was tried once more, in a new one
    assert stub.num_closed == 4
