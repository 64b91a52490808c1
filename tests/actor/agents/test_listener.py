"""Laws of the agents' endpoint for other machines: its address, encryption and strangers."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop

from actor.agents import server, strangers
from actor.agents.listener import OUTSIDE, listen
from common.config.actor import ActorSection, AgentServerOptions
from common.config.load import load_config
from common.errors import ConfigError, WireError
from common.wire.addresses import is_here, is_loopback, local_address_towards
from tests.actor.agents.endpoint import ByHeart, endpoint
from tests.actor.agents.test_repeats import CHAT, connected
from tools.checks.preflight import check_agent

CERTIFICATE = str(Path(__file__).parent / "tls" / "localhost.pem")
KEY = str(Path(__file__).parent / "tls" / "localhost.key")
ASKED = {"messages": [{"role": "user", "content": "Which way?"}]}
PUBLIC = AgentServerOptions(host="0.0.0.0", advertise="http://127.0.0.1:{port}")


def url_of(**options: Any) -> str:
    found = listen(AgentServerOptions(**options))
    found.socket.close()
    return found.url


def test_agents_receive_the_advertised_url_with_the_port() -> None:
    found = listen(AgentServerOptions(advertise="http://host.docker.internal:{port}/"))
    with found.socket as place:
        assert found.url == f"http://host.docker.internal:{place.getsockname()[1]}"
    assert url_of(advertise="https://gpu1.example/a/") == "https://gpu1.example/a"
    assert urlsplit(url_of()).hostname == "127.0.0.1"
    assert urlsplit(url_of(host="localhost")).hostname == "localhost"


def test_actors_of_one_machine_take_consecutive_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = AgentServerOptions(port=port)
        with pytest.raises(ConfigError, match=rf"actor\.agents\.port={port}, host=127\.0\.0\.1"):
            listen(options)
        found = listen(options, num_ports=50)
        with found.socket as place:
            assert port < place.getsockname()[1] < port + 50


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_open_address_without_encryption_is_warned_about(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        url_of(host=host, advertise="http://gpu1:{port}")
    except ConfigError:
        assert host == "::"  # A machine without IPv6.
        return
    assert "WITHOUT ENCRYPTION" in caplog.text
    assert f"actor.agents.host={host}" in caplog.text
    caplog.clear()
    actor = ActorSection(endpoint=True, agent=["sh"], agents=AgentServerOptions(host=host))
    check_agent(actor)  # The command `train` warns before the actors start.
    assert "WITHOUT ENCRYPTION" in caplog.text
    caplog.clear()
    url = url_of(host=host, advertise="https://a", tls_certificate=CERTIFICATE, tls_key=KEY)
    assert (url, url_of()[:16]) == ("https://a", "http://127.0.0.1")
    assert caplog.text == ""


@pytest.mark.parametrize("file", ["/no/such.pem", __file__])
def test_unusable_certificate_is_refused_by_its_key(file: str) -> None:
    agents = AgentServerOptions(tls_certificate=file, tls_key=KEY)
    with pytest.raises(ConfigError, match=r"actor\.agents\.tls_certificate=.*PEM"):
        check_agent(ActorSection(endpoint=True, agent=["sh"], agents=agents))


def test_agent_samples_over_tls_with_a_trusted_certificate() -> None:
    options = AgentServerOptions(tls_certificate=CERTIFICATE, tls_key=KEY)

    async def run() -> None:
        policy = ByHeart(["go left"])
        async with endpoint(policy, options=options) as at:
            assert at.server.url.startswith("https://127.0.0.1:")
            trust = ssl.create_default_context(cafile=CERTIFICATE)
            headers = {"authorization": f"Bearer {at.episode.key}"}
            url = at.server.url + CHAT
            how: dict[str, Any] = {"json": ASKED, "headers": headers}
            async with aiohttp.ClientSession() as trusting:
                async with trusting.post(url, ssl=trust, **how) as reply:
                    told = await reply.json()
                assert told["choices"][0]["message"]["content"] == "go left"
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await trusting.post(url, **how)
            plain = url.replace("https", "http")
            with pytest.raises(aiohttp.ClientError):
                await at.http.post(plain, **how)
            assert len(policy.given) == 1

    asyncio.run(run())


def test_stranger_without_a_key_holds_no_body_and_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual_s = (strangers.FIRST_BYTE_S, strangers.KEY_S)
    monkeypatch.setattr(strangers, "FIRST_BYTE_S", 0.3)
    monkeypatch.setattr(strangers, "KEY_S", 0.3)

    async def run() -> None:
        async with endpoint(ByHeart(["go"]), options=PUBLIC) as at:
            async with connected(at) as silent:
                assert await silent.is_closed()
            place = urlsplit(at.server.url)
            reader, slow = await asyncio.open_connection(place.hostname, place.port)
            slow.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            slow.close()
            monkeypatch.setattr(strangers, "FIRST_BYTE_S", usual_s[0])
            monkeypatch.setattr(strangers, "KEY_S", usual_s[1])
            body = b"x" * (1 << 20)
            status, told = await at.post(CHAT, body, key="wrong")
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
            assert (await at.post(CHAT, ASKED))[0] == 200

    asyncio.run(run())


def test_number_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)

    async def run() -> None:
        async with endpoint(ByHeart(["go"]), options=PUBLIC) as at:
            assert (await at.post(CHAT, ASKED))[0] == 200
            async with connected(at) as first, connected(at), connected(at):
                assert await first.is_closed()
                assert (await at.post(CHAT, ASKED))[0] == 200  # It is no stranger.

    asyncio.run(run())


class Peer:
    """A connection of an address, for `Strangers`."""

    def __init__(self, address: str, counted: strangers.Strangers) -> None:
        self.is_closed = False
        self.stranger = counted.add((address, 1), lambda: -1, self.close)

    def close(self) -> None:
        self.is_closed = True


def test_flood_of_one_address_closes_its_own_connections() -> None:
    async def run() -> None:
        counted = strangers.Strangers(most=6, most_of_address=4)
        honest = Peer("10.0.0.1", counted)
        flood = [Peer("10.0.0.2", counted) for _ in range(9)]
        assert [each.is_closed for each in flood] == [True] * 5 + [False] * 4
        others = [Peer("10.0.0.3", counted) for _ in range(3)]  # The total is reached.
        assert [each.is_closed for each in flood] == [True] * 7 + [False] * 2
        assert not honest.is_closed
        for each in (honest, *flood, *others):
            each.stranger.forget()

    asyncio.run(run())


def test_address_of_a_client_is_its_network() -> None:
    assert strangers.network_of(("10.0.0.1", 5)) == "10.0.0.1"
    assert strangers.network_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    one, other = (strangers.network_of((f"2001:db8::{each}", 5, 0, 0)) for each in "12")
    assert one == other == "2001:db8::/64"
    assert strangers.network_of(("fe80::1%eth0", 5, 0, 0)) == "fe80::/64"
    assert strangers.network_of(None) == "unknown"


FLOODS = {
    "silent": b"",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nhost: ",
    "half a handshake": b"\x16\x03\x01\x02\x00\x01\x00",
    "wrong key": b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("sent", FLOODS.values(), ids=FLOODS)
def test_flood_shuts_no_client_with_a_key_out(
    sent: bytes,
    loop: Callable[[], asyncio.AbstractEventLoop],
    has_tls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client has the flood's address: the hardest case."""
    for limit in ("FIRST_BYTE_S", "HANDSHAKE_S", "KEY_S"):
        monkeypatch.setattr(strangers, limit, 60.0)  # The flood does not end by itself.
    scheme = "https" if has_tls else "http"
    tls: dict[str, Any] = {}
    if has_tls:
        tls = {"tls_certificate": CERTIFICATE, "tls_key": KEY}
    options = AgentServerOptions(host="0.0.0.0", advertise=scheme + "://127.0.0.1:{port}", **tls)
    trust = ssl.create_default_context(cafile=CERTIFICATE)

    async def run() -> None:
        async with endpoint(ByHeart(["go"]), options=options) as at:
            place = urlsplit(at.server.url)
            headers = {"authorization": f"Bearer {at.episode.key}"}
            with contextlib.ExitStack() as flood:
                for _ in range(3):
                    for _ in range(strangers.MAX_OF_ADDRESS):
                        peer = socket.create_connection((place.hostname, place.port), timeout=20)
                        flood.enter_context(peer)
                        with contextlib.suppress(ConnectionError):
                            peer.sendall(sent)
                        await asyncio.sleep(0)
                    async with (
                        aiohttp.ClientSession() as client,
                        client.get(
                            f"{at.server.url}/v1/models",
                            headers=headers,
                            ssl=trust,
                            timeout=aiohttp.ClientTimeout(total=120),
                        ) as answer,
                    ):
                        assert answer.status == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ("tls_key=a.pem", "tls_certificate and actor.agents.tls_key need each other"),
        ("advertise=gpu1", "must be http://host... or https://host..., or empty"),
        ("host=a b", "must be an address or a host name"),
    ],
)
def test_wrong_address_is_refused_by_its_key(given: str, law: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.agents\.\w+=.*{law}"):
        load_config("quickstart", [f"actor.agents.{given}"])


def has_route() -> bool:
    """Return whether this machine has a route to other machines."""
    try:
        local_address_towards(OUTSIDE[socket.AF_INET])
    except WireError:
        return False
    return True


def test_wildcard_address_advertises_this_machine() -> None:
    if has_route():
        host = urlsplit(url_of(host="0.0.0.0")).hostname or ""
        assert is_here(host)
        assert not is_loopback(host)
    else:
        with pytest.raises(ConfigError, match=r"Set actor\.agents\.advertise"):
            url_of(host="0.0.0.0")
