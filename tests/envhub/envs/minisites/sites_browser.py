"""A browser without a screen: walks the sites by role and name, and checks tasks as WebArena."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit

from fastapi.testclient import TestClient

VOID = {"input", "meta", "link", "br", "hr", "img"}
LOCATOR = re.compile(r"document\.querySelector\('#([\w-]+)'\)\?\.outerText \?\? ''")
INPUT_ROLES = {"text": "textbox", "search": "searchbox", "radio": "radio", "checkbox": "checkbox"}


@dataclass(slots=True)
class Node:
    tag: str
    attributes: dict[str, str]
    parent: "Node | None" = None
    children: "list[Node | str]" = field(default_factory=list)

    def text(self) -> str:
        parts = [c if isinstance(c, str) else f" {c.text()} " for c in self.children]
        if self.tag in ("a", "button", "label", "span", "strong", "li", "p", "h1"):
            parts = [c if isinstance(c, str) else c.text() for c in self.children]
        return " ".join("".join(parts).split())

    def walk(self) -> "list[Node]":
        nodes: list[Node] = [self]
        for child in self.children:
            if isinstance(child, Node):
                nodes.extend(child.walk())
        return nodes

    def form(self) -> "Node":
        node = self
        while node.tag != "form":
            assert node.parent is not None, "a control outside of any form"
            node = node.parent
        return node


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.top = Node("#document", {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {key: value or "" for key, value in attrs}, self.top)
        self.top.children.append(node)
        if tag not in VOID:
            self.top = node

    def handle_endtag(self, tag: str) -> None:
        assert self.top.tag == tag, f"</{tag}> closes <{self.top.tag}>"
        assert self.top.parent is not None
        self.top = self.top.parent

    def handle_data(self, data: str) -> None:
        if self.top.tag not in ("style", "title"):
            self.top.children.append(data)


def parse(text: str) -> Node:
    """Parse a page into a tree; its tags must be well nested."""
    parser = _Parser()
    parser.feed(text)
    assert parser.top is parser.root
    return parser.root


class Browser:
    """One visitor in one session, on one page at a time."""

    def __init__(self, client: TestClient, session: str | None) -> None:
        self.client = client
        self.headers = {} if session is None else {"X-Longstride-Session": session}
        self.url, self.status, self.page = "", 0, Node("#document", {})
        self._nodes: list[Node] = []

    def goto(self, url: str) -> str:
        """Open a URL; returns the page's source."""
        return self._load("GET", url, None)

    def _load(self, method: str, url: str, form: dict[str, str] | None) -> str:
        reply = self.client.request(
            method, url, data=form, headers=self.headers, follow_redirects=True
        )
        self.url, self.status, self.page = str(reply.url), reply.status_code, parse(reply.text)
        self._nodes = self.page.walk()
        return reply.text

    def role(self, node: Node) -> str:
        if node.tag == "a":
            return "link"
        if node.tag == "input":
            return INPUT_ROLES.get(node.attributes.get("type", "text"), "")
        return {"button": "button", "textarea": "textbox"}.get(node.tag, "")

    def name(self, node: Node) -> str:
        if node.tag in ("a", "button"):
            return node.text()
        if "aria-label" in node.attributes:
            return node.attributes["aria-label"]
        labels = [n for n in self._nodes if n.attributes.get("for") == node.attributes["id"]]
        (label,) = labels
        return label.text()

    def find(self, role: str, name: str) -> Node:
        """Return the only element of this role and accessible name."""
        nodes = [n for n in self._nodes if self.role(n) == role]
        found = [n for n in nodes if self.name(n) == name]
        assert len(found) == 1, f"{len(found)} of {role} {name!r} at {self.url}: " + ", ".join(
            self.name(n) for n in nodes
        )
        return found[0]

    def do(self, step: Mapping[str, object]) -> None:
        """Perform one step of a task's solution."""
        if step["do"] == "stop":
            return
        node = self.find(str(step["role"]), str(step["name"]))
        if step["do"] == "type":
            if node.tag == "textarea":
                node.children = [str(step["text"])]
            node.attributes["value"] = str(step["text"])
            if step["enter"]:
                assert node.tag == "input"
                self._submit(node.form())
            return
        assert step["do"] == "click"
        if node.tag == "a":
            self.goto(urljoin(self.url, node.attributes["href"]))
        elif node.tag == "button":
            self._submit(node.form())
        else:
            self._choose(node)

    def _choose(self, radio: Node) -> None:
        for node in radio.form().walk():
            if node.attributes.get("name") == radio.attributes["name"]:
                node.attributes.pop("checked", None)
        radio.attributes["checked"] = ""

    def _submit(self, form: Node) -> None:
        fields = {}
        for node in form.walk():
            name, kind = node.attributes.get("name"), node.attributes.get("type", "")
            if name is None or (kind in ("radio", "checkbox") and "checked" not in node.attributes):
                continue
            is_area = node.tag == "textarea"
            fields[name] = "".join(map(str, node.children)).removeprefix("\n") if is_area else ""
            fields[name] = fields[name] or node.attributes.get("value", "")
        target = urljoin(self.url, form.attributes["action"])
        if form.attributes["method"] == "post":
            self._load("POST", target, fields)
        else:
            self.goto(f"{target}?{urlencode(fields)}")

    def text_of(self, element: str) -> str:
        """Return the text of the element with this id; "" when there is none."""
        found = [n for n in self.page.walk() if n.attributes.get("id") == element]
        return found[0].text() if found else ""


def satisfies(browser: Browser, check: Mapping[str, Any], answer: str) -> bool:
    """Return whether the browser's page, the answer and the site's content pass a check."""
    kinds = check["eval_types"]
    assert kinds
    return all(
        {"string_match": _answers, "url_match": _is_at, "program_html": _contains}[kind](
            browser, check, answer
        )
        for kind in kinds
    )


def _matches(wanted: Mapping[str, Any], text: str) -> bool:
    ((how, value),) = wanted.items()
    if how == "exact_match":
        return text.strip().lower() == str(value).lower()
    assert how == "must_include"
    return all(part.lower() in text.lower() for part in value)


def _answers(browser: Browser, check: Mapping[str, Any], answer: str) -> bool:
    return _matches(check["reference_answers"], answer)


def _is_at(browser: Browser, check: Mapping[str, Any], answer: str) -> bool:
    gold, got = urlsplit(str(check["reference_url"])), urlsplit(browser.url)
    given = parse_qs(got.query)
    return gold.netloc + gold.path in got.netloc + got.path and all(
        set(values) & set(given.get(key, [])) for key, values in parse_qs(gold.query).items()
    )


def _contains(browser: Browser, check: Mapping[str, Any], answer: str) -> bool:
    pages = check["program_html"]
    assert pages
    for page in pages:
        reader = Browser(browser.client, browser.headers.get("X-Longstride-Session"))
        reader.goto(page["url"])
        locator = LOCATOR.fullmatch(page["locator"])
        assert locator is not None
        if not _matches(page["required_contents"], reader.text_of(locator[1])):
            return False
    return True
