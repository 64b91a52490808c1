"""Laws of advertised addresses and of the address book."""

import pytest

from common.errors import ConfigError, WireError
from common.wire.addresses import (
    AddressBook,
    advertised,
    host_of,
    is_here,
    local_address_towards,
    own_host_towards,
    with_host,
)
from common.wire.messages import Directory, HubPlace

FAR = "192.0.2.77"  # of the documentation's network: no machine has it


def directory(number: int, learner: str, *, hub: str = "http://10.0.0.9:80") -> Directory:
    return Directory(
        number=number,
        learner=learner,
        weights=learner,
        hubs=[HubPlace(url=hub, token="t", envs=["a"])] if hub else [],
    )


def test_only_the_host_of_an_address_changes() -> None:
    assert host_of("tcp://10.0.0.1:5") == "10.0.0.1"
    assert host_of("http://[::1]:5/") == "::1"
    assert with_host("tcp://0.0.0.0:5", "::1") == "tcp://[::1]:5"
    assert with_host("http://*:5", "a.b") == "http://a.b:5"


def test_advertised_address_is_never_the_wildcard() -> None:
    assert advertised("tcp://0.0.0.0:5", towards="tcp://127.0.0.1:9") == "tcp://*:5"
    assert advertised("tcp://10.1.1.1:5", towards="tcp://127.0.0.1:9") == "tcp://10.1.1.1:5"
    told = advertised("tcp://0.0.0.0:5", towards=f"tcp://{FAR}:9")
    assert is_here(host_of(told))
    assert host_of(told) not in ("0.0.0.0", "*", "127.0.0.1")


def test_wildcard_listener_advertises_its_outward_interface() -> None:
    assert own_host_towards("10.0.0.3", [FAR]) == "10.0.0.3"
    assert own_host_towards("0.0.0.0", ["127.0.0.1", ""]) == "127.0.0.1"
    assert is_here(own_host_towards("0.0.0.0", ["127.0.0.1", FAR]))
    assert own_host_towards("0.0.0.0", ["127.0.0.1", FAR]) != "127.0.0.1"


def test_star_resolves_to_the_scheduler_host() -> None:
    book = AddressBook(lambda: f"tcp://{FAR}:9")
    assert book.find_address("learner") is None
    book.take(directory(1, "tcp://*:5", hub="http://*:80"))
    assert book.find_address("learner") == f"tcp://{FAR}:5"
    assert [place.url for place in book.hubs()] == [f"http://{FAR}:80"]
    assert book.find_address("scheduler") == f"tcp://{FAR}:9"


def test_restarted_scheduler_keeps_known_addresses() -> None:
    book = AddressBook(lambda: "tcp://127.0.0.1:9")
    book.take(directory(7, "tcp://127.0.0.1:5"))
    assert book.is_complete
    book.forget_number()
    assert (book.number, book.find_address("learner")) == (0, "tcp://127.0.0.1:5")
    book.take(directory(1, "", hub=""))
    assert (book.number, book.find_address("weights")) == (1, "tcp://127.0.0.1:5")
    assert book.is_complete


def test_remote_loopback_address_is_refused_with_remedy() -> None:
    book = AddressBook(lambda: f"tcp://{FAR}:9")
    with pytest.raises(ConfigError, match=r"Start the run with learner\.host=0\.0\.0\.0"):
        book.take(directory(1, "tcp://127.0.0.1:5"))
    with pytest.raises(ConfigError, match=r"envhub\.host=0\.0\.0\.0"):
        book.take(directory(1, "tcp://*:5", hub="http://localhost:80"))


def test_known_local_address_survives_a_lost_route(monkeypatch: pytest.MonkeyPatch) -> None:
    local_address_towards.cache_clear()
    with pytest.raises(WireError, match=r"no network route to nosuch\.invalid"):
        local_address_towards("nosuch.invalid")
    known = local_address_towards("127.0.0.1")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    assert local_address_towards("127.0.0.1") == known
