"""A small web site and an event loop for tests that drive the browser."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import pytest
from fastapi import FastAPI, Form
from fastapi.responses import HTMLResponse, RedirectResponse

from common.config.envs import BrowserOptions, EnvsSection
from envhub.env import AsyncEnv, EnvSpec, Style
from envhub.web.browser import BrowserHost, check_browser, host_rules
from envhub.web.local_site import LocalSite
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.tree import PageNode, Snapshot

T = TypeVar("T")
HOME = """<title>Home</title><h1>Welcome</h1>
<a href="/other">Other</a> <a href="/other" target="_blank">New tab</a>
<a href="http://elsewhere.test/">Elsewhere</a>
<form action="/send" method="post"><label>Name <input name="who"></label>
<select name="tint" aria-label="Tint"><option>red<option>blue</select>
<input type="date" name="day" aria-label="Day"><button>Go</button></form>
<button onclick="document.title = confirm('Sure?') ? 'yes' : 'no'">Ask</button>
<button onclick="fetch('/slow').then(r => r.text()).then(t => { this.innerText = t })">Load</button>
<div style="height:3000px"></div><button>Deep down</button>"""


def site_app() -> FastAPI:
    """Return the site's application."""
    app = FastAPI()

    @app.get("/", response_class=HTMLResponse)
    async def home() -> str:
        return HOME

    @app.get("/other", response_class=HTMLResponse)
    async def other(said: str = "nothing") -> str:
        return f"<title>Other</title><p>You said {said}</p><a href='/'>Back home</a>"

    @app.post("/send")
    async def send(who: str = Form(), tint: str = Form(), day: str = Form("")) -> RedirectResponse:
        return RedirectResponse(f"/other?said={who}-{tint}-{day}", status_code=303)

    @app.get("/broken")
    async def broken() -> HTMLResponse:
        return HTMLResponse("<p>You said hi</p>", status_code=503)

    @app.get("/crashed")
    async def crashed() -> HTMLResponse:
        return HTMLResponse("<p>Server error</p>", status_code=500)

    @app.get("/crashing")
    async def crashing() -> HTMLResponse:
        return HTMLResponse("<script>fetch('/crashed')</script><p>Fine</p>")

    @app.get("/slow")
    async def slow() -> HTMLResponse:
        await asyncio.sleep(0.1)
        return HTMLResponse("loaded")

    return app


class Rig:
    """The site, the browser and the loop that both live in."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.run(self._start())

    async def _start(self) -> None:
        self.site = LocalSite(site_app())
        await self.site.start()
        self.browser = BrowserHost(BrowserOptions(), host_rules({"site.test": self.site.address}))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run work in the rig's loop and returns its result."""
        return self._runner.run(work)

    async def session(self, *, is_own_site: bool = False) -> WebSession:
        """Return a session with the home page open."""
        context = await self.browser.open_context()
        session = WebSession(
            context,
            SnapshotSettings(max_settle_ms=5000),
            may_go=lambda url: url.startswith("http://site.test/"),
            action_timeout_s=5.0,
            is_own_site=is_own_site,
        )
        await session.open("http://site.test/")
        return session

    def stop(self) -> None:
        """End everything."""
        self.run(self.browser.stop())
        self.run(self.site.stop())
        self._runner.close()


def has_browser() -> bool:
    """Whether this machine has a browser to drive."""
    return not check_browser(BrowserOptions())


# For tests that drive the browser.
needs_browser = pytest.mark.skipif(not has_browser(), reason="no Chromium on this machine")


def in_browser(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a slow test that runs a coroutine in the loop of the fixture `rig`."""

    @needs_browser
    @pytest.mark.slow
    @functools.wraps(test)
    def run(rig: Rig, **others: object) -> None:
        rig.run(test(rig, **others))

    return run


def on_session(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a slow test of a session with the home page open; see `in_browser`."""

    async def with_session(rig: Rig, **others: object) -> None:
        session = await rig.session()
        await test(session, **others)
        await session.close()

    first, *more = inspect.signature(test).parameters.values()
    functools.update_wrapper(with_session, test)
    parameters = [first.replace(name="rig", annotation=Rig), *more]
    vars(with_session)["__signature__"] = inspect.signature(test).replace(parameters=parameters)
    return in_browser(with_session)


class EnvRig:
    """A browser environment's catalogue entry and the loop that its episodes live in."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the rig's loop and return its result."""
        return self._runner.run(work)

    def stop(self) -> None:
        """End what the episodes share."""
        self.run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        assert self.spec.stop is not None
        await self.spec.stop()


def env_rigs(make_spec: Callable[[EnvsSection], EnvSpec]) -> Iterator[EnvRig]:
    """Yield a rig of an environment as it is by default, and stop it."""
    rig = EnvRig(make_spec(EnvsSection()))
    yield rig
    rig.stop()


def observations(rig: EnvRig, items: Sequence[str]) -> list[list[str]]:
    """Return what the expert is shown in each of these items."""

    async def all_items() -> list[list[str]]:
        return [(await play(rig.spec, item))[0] for item in items]

    return rig.run(all_items())


def assert_played_alike_elsewhere(
    rig: EnvRig, make_spec: Callable[[EnvsSection], EnvSpec], items: Sequence[str]
) -> list[list[str]]:
    """Return what the items show: the same in a browser of its own, in the opposite order."""
    first = observations(rig, items)
    other = EnvRig(make_spec(EnvsSection()))
    try:
        assert observations(other, items[::-1])[::-1] == first
    finally:
        other.stop()
    return first


async def play(spec: EnvSpec, item: str, style: Style = Style.COMPACT) -> tuple[list[str], float]:
    """Return the observations of an episode that the expert plays, and its reward."""
    env = cast(AsyncEnv, spec.make(style))
    try:
        seen = [await env.reset(item, 0)]
        for _ in range(2 * spec.subsets[item.split("-")[0]].max_turns):
            action = await env.expert_action()
            assert action is not None, f"{item}: the expert knows no way\n{seen[-1]}"
            result = await env.step(action)
            assert result.is_valid, f"{item}: {action} is refused\n{result.observation}"
            seen.append(result.observation)
            if result.done:
                return seen, result.reward
        return seen, 0.0
    finally:
        await env.close()


def find(snapshot: Snapshot, role: str, name: str) -> PageNode:
    """Return the node of a role and name."""
    return next(n for n in snapshot.nodes if (n.role, n.name) == (role, name))
