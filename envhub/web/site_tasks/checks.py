"""Grading of an episode by WebArena's three checks: answer, final address, page contents."""

import asyncio
import html
import logging
import re
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit, urlunsplit

from playwright.async_api import Error as BrowserError
from playwright.async_api import Page

from envhub.env import EnvFailure
from envhub.tables import read_table
from envhub.web.browser import first_line
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
        for text, functions in ((target["url"], TARGETS), (target["locator"], VALUES)):
            if text.startswith("func:"):
                match = CALL.fullmatch(text.strip())
                if match is None or match["name"] not in functions:
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
        link = await page.evaluate(ORDER_LINKS)
    if not link:
        raise EnvFailure("the shop lists no order; check the account in envs.webarena.auth_dir")
    return link


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


logger = logging.getLogger(__name__)
OR = " |OR| "
UNACHIEVABLE = "N/A"
CRASHED = "crashed"  # Part of the browser's error about a page whose process has ended.
GRADE_TIMEOUT_S = 45.0
WORDS = read_table(__file__, "words.yaml")
FILLER_WORDS = frozenset(WORDS["filler"].split())


def clean_answer(text: str) -> str:
    """Return an answer in lower case, without surrounding whitespace and quotes."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text.lower()


def is_exact(reference: str, answer: str) -> bool:
    """Whether two answers are equal, except for case and surrounding quotes."""
    return clean_answer(reference) == clean_answer(answer)


def includes(reference: str, answer: str, *, whole_words: bool = False) -> bool:
    """Whether the answer contains the reference.

    Args:
        whole_words: a reference of one character must be a separate word, since "0" is in "10".
    """
    needle = clean_answer(reference)
    hay = clean_answer(answer)
    if whole_words and len(needle) == 1:
        return needle in re.findall(r"\w+|[^\w\s]", hay)
    return needle in hay


def is_alike(reference: str, answer: str) -> bool:
    """Whether the answer has every meaningful word and number of the reference.

    WebArena asks a language model whether both mean the same. This function normalises case,
    punctuation, filler words and units of time, and then requires all words. It rejects more
    paraphrases and ignores negations.
    """
    if reference.strip() == UNACHIEVABLE:
        return is_exact(reference, answer)
    needed = _words(reference)
    answered = _words(answer)
    return bool(needed) and needed <= answered


def _words(text: str) -> frozenset[str]:
    """Return the meaningful words and numbers of an answer."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.lower())
    text = re.sub(r"(\d)(min|h|km|m|hr)", r"\1 \2", text)
    words: list[str] = re.findall(r"[a-z]+|\d+(?:\.\d+)?", text)
    return frozenset(WORDS["units"].get(word, word) for word in words if word not in FILLER_WORDS)


def answer_matches(references: Mapping[str, Any], answer: str) -> bool:
    """Whether an answer matches all reference answers of a task.

    Raises: ValueError: an unknown kind of comparison.
    """
    for kind, wanted in references.items():
        if kind == "exact_match":
            ok = is_exact(wanted, answer)
        elif kind == "must_include":
            ok = all(includes(part, answer, whole_words=len(wanted) == 1) for part in wanted)
        elif kind == "fuzzy_match":
            parts = [wanted] if isinstance(wanted, str) else wanted
            ok = all(is_alike(part, answer) for part in parts)
        else:
            raise ValueError(f"unknown kind of reference answer {kind!r}")
        if not ok:
            return False
    return True


def url_matches(reference: str, url: str) -> bool:
    """Whether an address has the host, path and query values of one of the references.

    References are joined by " |OR| ". An address may have further parts: the path of a reference is
    a part of it, and a value of the query is equal.
    """
    references = [urlsplit(part.strip().rstrip("/")) for part in reference.split(OR)]
    address = urlsplit(url.rstrip("/"))
    base = _place(address)
    if not any(_place(part) in base for part in references):
        return False
    wanted: dict[str, set[str]] = {}
    for part in references:
        for name, values in parse_qs(part.query).items():
            wanted.setdefault(name, set()).update(values)
    has = parse_qs(address.query)
    return all(values.intersection(has.get(name, [])) for name, values in wanted.items())


def _place(parts: SplitResult) -> str:
    """Return host and path without a slash at the end."""
    return (parts.netloc + parts.path).rstrip("/")


def contents_match(required: Mapping[str, Any], text: str) -> bool:
    """Whether a page's text equals, or contains, a task's required contents.

    Raises: ValueError: an unknown kind of comparison.
    """
    text = html.unescape(text)
    if "exact_match" in required:
        return is_exact(required["exact_match"], text)
    if "must_include" in required:
        parts: Iterable[str] = required["must_include"]
        return all(any(includes(one, text) for one in part.split(OR)) for part in parts)
    raise ValueError(f"unknown kind of required contents {list(required)!r}")


async def grade(checks: Mapping[str, Any], session: WebSession, answer: str) -> float:
    """Return 1.0 if every check of a task passes, else 0.0.

    Raises:
        EnvFailure: a checked page does not respond.
        ValueError: an unknown check.
    """
    try:
        async with asyncio.timeout(GRADE_TIMEOUT_S):
            for kind in checks["eval_types"]:
                if not await _passes(kind, checks, session, answer):
                    return 0.0
    except TimeoutError as error:
        raise EnvFailure(f"the checks took longer than {GRADE_TIMEOUT_S} s") from error
    return 1.0


async def _passes(kind: str, checks: Mapping[str, Any], session: WebSession, answer: str) -> bool:
    """Return whether one kind of check passes."""
    if kind == "string_match":
        return answer_matches(checks["reference_answers"], answer)
    if kind == "url_match":
        return url_matches(checks["reference_url"], session.page.url)
    if kind == "program_html":
        return await _pages_match(checks["program_html"], session)
    raise ValueError(f"unknown kind of check {kind!r}")


async def _pages_match(targets: Iterable[Mapping[str, Any]], session: WebSession) -> bool:
    """Return whether all pages have their required contents."""
    for target in targets:
        url = await target_url(target["url"], session)
        if url == "last":
            text = await _read(session.page, target)
        else:
            async with session.aside(url) as page:
                text = await _read(page, target)
        if not contents_match(target["required_contents"], text):
            return False
    return True


async def _read(page: Page, target: Mapping[str, Any]) -> str:
    """Return the text that the target's locator selects; "" if it selects nothing.

    Locators are JavaScript expressions from our or WebArena's task files, never from a model. A
    preparing action that fails has no effect, as in WebArena.

    Raises: EnvFailure: the page is gone.
    """
    locator: str = target["locator"].strip()
    if not locator:
        return await page.content()
    for action in target.get("prep_actions", ()):
        if await _evaluated(page, page.evaluate(f"() => {{ {action} }}")) is FAILED:
            break
    if locator.startswith("func:"):
        value = await _evaluated(page, page_value(locator, page))
    else:
        value = await _evaluated(page, page.evaluate(f"() => {locator}"))
    return "" if value is None or value is FAILED else str(value)


FAILED = object()


async def _evaluated(page: Page, script: Coroutine[Any, Any, Any]) -> Any:
    """Return the value of a script of a check; FAILED if it raised an error.

    A script raises an error if the page lacks its element.

    Raises: EnvFailure: the page is gone.
    """
    try:
        return await script
    except BrowserError as error:
        if page.is_closed() or CRASHED in str(error):
            raise EnvFailure(f"the page to check is gone: {first_line(error)}") from error
        logger.debug("script of a check failed url=%s error=%s", page.url, error)
        return FAILED
