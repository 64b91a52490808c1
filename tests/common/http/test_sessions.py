"""Laws of sessions for event loops, with a real server and a real proxy."""

import asyncio

import aiohttp
import httpx
import pytest

from common.http.sessions import open_httpx, open_session
from tests.common.http.conftest import Served

OTHER = "http://elsewhere.example:8080/path"


async def _by_aiohttp(url: str, *, is_own: bool = False) -> str:
    async with open_session(url, is_own=is_own) as session, session.get(url) as answer:
        return await answer.text()


async def _by_httpx(url: str) -> str:
    async with open_httpx(httpx, url) as client:
        return (await client.get(url)).text


def test_own_server_answers_beside_a_closed_proxy(server: Served, closed_proxy: None) -> None:
    url = f"http://{server.address}/x"
    assert asyncio.run(_by_aiohttp(url)) == "here"
    assert asyncio.run(_by_httpx(url)) == "here"
    assert server.asked == [("GET", "/x", "")] * 2


def test_other_server_is_asked_through_the_proxy(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://user:pass@{server.address}")
    assert asyncio.run(_by_aiohttp(OTHER)) == "here"
    assert asyncio.run(_by_httpx(OTHER)) == "here"
    assert server.asked == [("GET", OTHER, "user:pass")] * 2


def test_remote_own_service_bypasses_the_proxy(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{server.address}")
    with pytest.raises(aiohttp.ClientConnectorError):
        asyncio.run(_by_aiohttp("http://hub.invalid:8080", is_own=True))
    assert server.asked == []
