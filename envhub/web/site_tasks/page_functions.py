"""Own implementations of the few functions that WebArena's checks call."""

import re
from urllib.parse import urlsplit, urlunsplit

from playwright.async_api import Page

from envhub.env import EnvFailure
from envhub.web.session import WebSession

CALL = re.compile(r"func:(?P<name>\w+)\((?P<arguments>.*)\)")
TARGETS = frozenset({"shopping_get_latest_order_url", "reddit_get_post_url"})
VALUES = frozenset({"gitlab_get_project_memeber_role"})
ORDER_LINKS = "() => document.querySelector('#my-orders-table a[href*=\"order_id\"]')?.href ?? ''"
MEMBER_ROLE = """(user) => {
  const rows = Array.from(document.querySelectorAll('tr'));
  const row = rows.find((r) => r.querySelector('[data-label="Account"]')
    ?.innerText.split(/\\s+/).includes('@' + user));
  return row ? row.querySelector('[data-label="Max role"], .col-max-role')?.innerText ?? '' : '';
}"""


def unsupported(checks: dict) -> str:
    """Return the name of an unimplemented function in a task's checks; "" if there is none."""
    for target in checks["program_html"] or ():
        for text, known in ((target["url"], TARGETS), (target["locator"], VALUES)):
            if text.startswith("func:"):
                match = CALL.fullmatch(text.strip())
                if match is None or match["name"] not in known:
                    return match["name"] if match else text
    return ""


async def target_url(url: str, session: WebSession) -> str:
    """Return the address of the page to check; "last" is the agent's current page.

    Raises:
        ValueError: an unknown function.
        EnvFailure: a required page does not respond.
    """
    if not url.startswith("func:"):
        return url
    match = CALL.fullmatch(url)
    if match is None or match["name"] not in TARGETS:
        raise ValueError(f"unknown function {url!r}")
    if match["name"] == "reddit_get_post_url":
        return reddit_post_url(session.page.url)
    parts = urlsplit(session.page.url)
    history = urlunsplit((parts.scheme, parts.netloc, "/sales/order/history/", "", ""))
    async with session.aside(history) as page:
        found = await page.evaluate(ORDER_LINKS)
    if not found:
        raise EnvFailure("the shop lists no order; check the account in envs.webarena.auth_dir")
    return found


def reddit_post_url(url: str) -> str:
    """Return the address of the post to which an address belongs, or the address itself.

    A post is at /f/<forum>/<number>/<title>; its comments are below it.
    """
    parts = urlsplit(url)
    words = parts.path.strip("/").split("/")
    if len(words) >= 3 and words[0] == "f" and words[2].isdigit():
        return urlunsplit((parts.scheme, parts.netloc, "/" + "/".join(words[:3]) + "/", "", ""))
    return url


async def page_value(locator: str, page: Page) -> str:
    """Return the value that a check's function reads from a page.

    Raises: ValueError: an unknown function.
    """
    match = CALL.fullmatch(locator)
    if match is None or match["name"] not in VALUES:
        raise ValueError(f"unknown function {locator!r}")
    user = re.findall(r"'([^']*)'", match["arguments"])
    return await page.evaluate(MEMBER_ROLE, user[-1] if user else "")
