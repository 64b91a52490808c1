"""Laws of the local web sites of environments: a failed start is a failure of the environment."""

import asyncio
from typing import Any

import pytest

from envhub.env import EnvFailure
from envhub.web.local_site import LocalSite


async def hanging(scope: Any, receive: Any, send: Any) -> None:
    """Never answer the start of the server."""
    await asyncio.Event().wait()


async def failing(scope: Any, receive: Any, send: Any) -> None:
    """Fail at the start of the server."""
    raise RuntimeError("no pages")


def test_site_that_hangs_at_its_start_is_a_failed_environment() -> None:
    with pytest.raises(EnvFailure, match=r"the local site did not start within 0\.1 s"):
        asyncio.run(LocalSite(hanging, start_timeout_s=0.1).start())


def test_site_that_fails_at_its_start_does_not_end_the_process() -> None:
    with pytest.raises(EnvFailure, match="the application of the local site failed at its start"):
        asyncio.run(LocalSite(failing).start())


def test_failed_site_releases_its_port() -> None:
    sites = [LocalSite(hanging, start_timeout_s=0.1), LocalSite(failing)]
    for site in sites:
        with pytest.raises(EnvFailure):
            asyncio.run(site.start())
    assert [site._socket.fileno() for site in sites] == [-1, -1]
