"""A small web site and an event loop for tests that drive the browser."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI, Form
from fastapi.responses import HTMLResponse, RedirectResponse

from common.config.envs import BrowserOptions
from envhub.web.browser import BrowserHost, check_browser, host_rules
from envhub.web.local_site import LocalSite
from envhub.web.session import Look, WebSession
from envhub.web.tree import Node, Snapshot

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
    """Returns the site's application."""
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
        """Runs work in the rig's loop and returns its result."""
        return self._runner.run(work)

    async def session(self) -> WebSession:
        """Returns a session with the home page open."""
        context = await self.browser.open_context()
        session = WebSession(
            context,
            Look(max_settle_ms=5000),
            may_go=lambda url: url.startswith("http://site.test/"),
            action_timeout_s=5.0,
        )
        await session.open("http://site.test/")
        return session

    def stop(self) -> None:
        """Ends everything."""
        self.run(self.browser.stop())
        self.run(self.site.stop())
        self._runner.close()


def has_browser() -> bool:
    """Whether this machine has a browser to drive."""
    return not check_browser(BrowserOptions())


def find(snapshot: Snapshot, role: str, name: str) -> Node:
    """Returns the node of a role and name."""
    return next(n for n in snapshot.nodes if (n.role, n.name) == (role, name))
