"""Laws of the encrypted sockets."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from common.errors import ConfigError
from common.wire.codec import decode, encode
from common.wire.messages import Ack, Rejected
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import Received, Router, connect_dealer


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return create_keys(tmp_path / "keys")


@pytest.fixture
def router(keys: RunKeys) -> Iterator[Router]:
    router = Router(keys, host="127.0.0.1", port=0)
    yield router
    router.close()


Connect = Callable[..., zmq.Socket]


@pytest.fixture
def connect(keys: RunKeys, router: Router) -> Iterator[Connect]:
    """Yields a function that connects a dealer to the router; all are closed at the end."""
    context = zmq.Context()
    dealers: list[zmq.Socket] = []

    def start(*, identity: str = "", own_keys: RunKeys = keys) -> zmq.Socket:
        address = f"tcp://127.0.0.1:{router.port}"
        dealers.append(
            connect_dealer(context, own_keys, address=address, identity=identity, timeout_s=60.0)
        )
        return dealers[-1]

    yield start
    for dealer in dealers:
        dealer.close(linger=0)
    context.destroy(linger=0)


def receive_until(router: Router, num: int) -> list[Received]:
    """The first messages, at most a minute for each."""
    received: list[Received] = []
    while len(received) < num:
        news = router.receive_all(timeout_s=60.0)
        assert news, f"only {len(received)} of {num} messages came"
        received += news
    return received


def test_router_answers_each_sender(router: Router, connect: Connect) -> None:
    dealers = [connect() for _ in range(2)]
    for number, dealer in enumerate(dealers):
        dealer.send_multipart(encode(Rejected(reason=str(number))))
    for received in receive_until(router, 2):
        answer = Ack(episode_id=received.message.reason, is_accepted=True, reason="")
        assert router.send(received.sender, answer)
    answers = [decode(dealer.recv_multipart()).episode_id for dealer in dealers]
    assert answers == ["0", "1"]


def test_router_rejects_messages_under_a_foreign_key(
    router: Router, keys: RunKeys, connect: Connect, tmp_path: Path
) -> None:
    foreign = create_keys(tmp_path / "foreign")
    mixed = RunKeys(
        server_public=keys.server_public,
        server_secret="",
        client_public=foreign.client_public,
        client_secret=foreign.client_secret,
        hub_token="",
    )
    stranger = connect(own_keys=mixed)
    stranger.setsockopt(zmq.SNDTIMEO, 0)
    with contextlib.suppress(zmq.Again):  # The router may refuse it earlier.
        stranger.send_multipart(encode(Rejected(reason="stranger")))
    deadline = time.monotonic() + 30.0
    while not router.num_refused("data").get("data/strangers/key"):
        assert time.monotonic() < deadline, "the handshake was not refused"
        assert router.receive_all(timeout_s=0.05) == []
    friend = connect()
    friend.send_multipart(encode(Rejected(reason="friend")))
    assert [r.message.reason for r in receive_until(router, 1)] == ["friend"]
    assert router.receive_all(timeout_s=0.1) == []


def test_invalid_message_is_counted_and_answered_alone(router: Router, connect: Connect) -> None:
    bad, good = connect(), connect()
    bad.send_multipart([b"\xc1 rubbish"])
    assert router.receive_all(timeout_s=5.0) == []
    answer = decode(bad.recv_multipart())
    assert isinstance(answer, Rejected)
    assert "not msgpack" in answer.reason
    assert router.num_invalid == 1
    good.send_multipart(encode(Rejected(reason="good")))
    bad.send_multipart(encode(Rejected(reason="better")))
    names = {received.message.reason for received in receive_until(router, 2)}
    assert names == {"good", "better"}
    assert router.num_invalid == 1


def test_port_in_use_is_a_config_error(router: Router, keys: RunKeys) -> None:
    with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{router.port}"):
        Router(keys, host="127.0.0.1", port=router.port)


def test_batch_send_reports_missing_peers(router: Router, connect: Connect) -> None:
    dealers = [connect() for _ in range(3)]
    for number, dealer in enumerate(dealers):
        dealer.send_multipart(encode(Rejected(reason=str(number))))
    senders = {each.message.reason: each.sender for each in receive_until(router, 3)}
    shared = Ack(episode_id="shared", is_accepted=True, reason="")
    own = Ack(episode_id="own", is_accepted=True, reason="")
    batch = [(senders["0"], shared), (b"nobody", shared), (senders["1"], own)]
    assert router.send_all([*batch, (senders["2"], shared)]) == [b"nobody"]
    answers = [decode(dealer.recv_multipart()).episode_id for dealer in dealers]
    assert answers == ["shared", "own", "shared"]


def test_sending_to_an_absent_peer_returns_false(router: Router) -> None:
    assert not router.send(b"nobody", Rejected(reason=""))


def test_new_connection_takes_over_its_identity(router: Router, connect: Connect) -> None:
    first = connect(identity="actor-0")
    first.send_multipart(encode(Rejected(reason="first")))
    receive_until(router, 1)
    second = connect(identity="actor-0")
    second.send_multipart(encode(Rejected(reason="second")))
    (received,) = receive_until(router, 1)
    assert received.sender == b"actor-0"
    router.send(received.sender, Rejected(reason="to the second"))
    assert decode(second.recv_multipart()).reason == "to the second"


def test_receiving_stops_at_its_limit(router: Router, connect: Connect) -> None:
    dealer = connect()
    for number in range(3):
        dealer.send_multipart(encode(Rejected(reason=str(number))))
    names: list[str] = []
    while len(names) < 3:
        news = router.receive_all(timeout_s=60.0, limit=1)
        assert len(news) == 1
        names += [received.message.reason for received in news]
    assert names == ["0", "1", "2"]


def test_router_listens_on_ipv6_addresses(keys: RunKeys) -> None:
    try:
        router = Router(keys, host="::1", port=0)
    except ConfigError as error:
        pytest.skip(str(error))
    context = zmq.Context()
    dealer = connect_dealer(context, keys, address=f"tcp://[::1]:{router.port}", timeout_s=60.0)
    dealer.send_multipart(encode(Rejected(reason="v6")))
    assert [r.message.reason for r in receive_until(router, 1)] == ["v6"]
    dealer.close(linger=0)
    context.destroy(linger=0)
    router.close()


@pytest.mark.long
def test_router_hears_a_thousand_simultaneous_peers(router: Router, keys: RunKeys) -> None:
    num, context = 1_000, zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * num)
    address = f"tcp://127.0.0.1:{router.port}"
    dealers = [connect_dealer(context, keys, address=address) for _ in range(num)]
    try:
        for dealer in dealers:
            dealer.send_multipart(encode(Rejected(reason="here")))
        heard = receive_until(router, num)
        assert len({each.sender for each in heard}) == num
        assert router.report()["connections"] == {
            "open": num,
            "accepted": num,
            "refused": {},
            "refused_by_address": {},
        }
    finally:
        for dealer in dealers:
            dealer.close(linger=0)
        context.destroy(linger=0)
