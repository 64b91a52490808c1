"""Laws of proxies: which requests go through one, and which variable counts."""

import socket

import psutil
import pytest

from common.host.loopback import direct_loopback
from common.http.proxies import ProxyFailed, proxy_for, route_note

OTHER = "http://elsewhere.example:8080/path"


def test_own_services_bypass_the_proxy(closed_proxy: None) -> None:
    assert proxy_for("http://10.1.2.3:8080", is_own=True) is None
    assert proxy_for("https://hub.example", is_own=True) is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "localhost", "[::1]", socket.gethostname(), "0.0.0.0"]
)
def test_this_machine_is_reached_directly(host: str, closed_proxy: None) -> None:
    assert proxy_for(f"http://{host}:8080/x") is None
    assert proxy_for(f"wss://{host}:8080/x") is None


def test_own_interface_is_reached_directly(closed_proxy: None) -> None:
    own = [a.address for many in psutil.net_if_addrs().values() for a in many if a.family == 2]
    assert [proxy_for(f"http://{address}:80") for address in own] == [None] * len(own)


def test_proxy_variable_follows_the_request_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://big.example:1")
    monkeypatch.setenv("http_proxy", "http://small.example:2")
    monkeypatch.setenv("ALL_PROXY", "rest.example:3")
    proxy = proxy_for(OTHER)
    assert proxy is not None
    assert (proxy.url, proxy.variable) == ("http://small.example:2", "http_proxy")
    assert proxy_for("ws://elsewhere.example/ws") == proxy
    proxy = proxy_for("https://elsewhere.example")
    assert proxy is not None
    assert (proxy.url, proxy.variable) == ("http://rest.example:3", "ALL_PROXY")


def test_no_variable_means_no_proxy() -> None:
    assert proxy_for(OTHER) is None
    assert route_note(OTHER) == ""


@pytest.mark.parametrize(
    ("exempt", "host", "is_direct"),
    [
        ("elsewhere.example", "elsewhere.example", True),
        (".example", "elsewhere.example", True),
        ("other.example, 10.9.8.7", "10.9.8.7", True),
        ("10.9.0.0/16", "10.9.8.7", True),
        ("10.9.0.0/16", "10.8.8.7", False),
        ("*", "elsewhere.example", True),
        ("nowhere.example", "elsewhere.example", False),
        ("not/a/network", "10.9.8.7", False),
    ],
)
def test_no_proxy_exempts_hosts_domains_and_networks(
    exempt: str, host: str, is_direct: bool, closed_proxy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", exempt)
    assert (proxy_for(f"http://{host}:8080") is None) == is_direct


def test_error_names_the_proxy_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@proxy.example:3128")
    assert route_note(OTHER) == (
        " (through the proxy http://proxy.example:3128 of http_proxy; "
        "add elsewhere.example to no_proxy to connect to it directly)"
    )


def test_unsupported_proxy_scheme_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
    with pytest.raises(ProxyFailed, match=r"kind socks5 is not supported .* of all_proxy; add"):
        proxy_for(OTHER)


def test_children_get_loopback_exempted_in_both_spellings() -> None:
    loopback = "localhost,127.0.0.1,::1"
    assert direct_loopback({"no_proxy": "a.example"}) == {}
    told = direct_loopback({"HTTPS_PROXY": "http://p", "no_proxy": "a.example, 127.0.0.1"})
    both = "a.example,127.0.0.1,localhost,::1"
    assert told == {"no_proxy": both, "NO_PROXY": both}
    assert direct_loopback({"all_proxy": "http://p"})["NO_PROXY"] == loopback
