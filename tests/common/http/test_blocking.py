"""Laws of blocking requests, with a real server and a real proxy."""

import pytest

from common.http.blocking import request
from common.http.proxies import ProxyFailed
from tests.common.http.conftest import Served, serving

OTHER = "http://me:pass@elsewhere.example:8080/path?a=b"


def test_own_server_answers_beside_a_closed_proxy(server: Served, closed_proxy: None) -> None:
    answer = request(f"http://{server.address}/x?y=1", timeout_s=60.0)
    assert (answer.status, answer.body) == (200, b"here")
    assert server.asked == [("GET", "/x?y=1", "")]


def test_other_server_is_asked_through_the_proxy(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:p%40ss@{server.address}")
    assert request(OTHER, timeout_s=60.0).body == b"here"
    assert server.asked == [("GET", "http://elsewhere.example:8080/path?a=b", "user:p@ss")]


def test_https_takes_a_tunnel_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(status=403) as proxy:
        monkeypatch.setenv("https_proxy", f"http://user:pass@{proxy.address}")
        with pytest.raises(ProxyFailed, match=r"403 Forbidden .* of https_proxy; add elsewhere"):
            request("https://elsewhere.example/x", timeout_s=60.0)
        assert proxy.asked == [("CONNECT", "elsewhere.example:443", "user:pass")]


def test_closed_proxy_is_named_with_its_variable(closed_proxy: None) -> None:
    with pytest.raises(ProxyFailed, match=r"refused .*127.0.0.1:9 of http_proxy; add elsewhere"):
        request(OTHER, timeout_s=60.0)


def test_proxy_requiring_a_login_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(status=407) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.address)
        with pytest.raises(ProxyFailed, match=r"407 Proxy Authentication Required .* of ALL_PROXY"):
            request(OTHER, timeout_s=60.0)


def test_proxy_status_error_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(status=502) as one:
        assert request(f"http://{one.address}", timeout_s=60.0).shown == "502 Bad Gateway"
        monkeypatch.setenv("http_proxy", f"http://{one.address}")
        answer = request(OTHER, timeout_s=60.0)
        assert answer.shown.startswith("502 Bad Gateway (through the proxy http://127.0.0.1:")


@pytest.mark.parametrize("url", ["", "hub:8080", "ftp://hub", "http://"])
def test_unsupported_address_scheme_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an address such as http://host:8080"):
        request(url, timeout_s=1.0)
