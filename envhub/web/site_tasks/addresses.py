"""Addresses of sites: a task's start pages, the allowed hosts, and the names shown to agents."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit


def start_urls(task: Mapping[str, Any]) -> list[str]:
    """Return the start addresses of a task, one for each tab."""
    return [url.strip() for url in task["start_url"].split("|AND|")]


def may_go(hosts: set[str]) -> Callable[[str], bool]:
    """Return a function that tests whether an address is on one of these hosts, including ports."""

    def test(url: str) -> bool:
        """Return whether an address is on an allowed host."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() in hosts

    return test


class PublicNames:
    """Translates between the sites' addresses and the public names shown to agents.

    Args:
        names: public name by address, both without a trailing slash; {}: agents see the addresses.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        # Longest first: the address of one site may begin with that of another.
        self._pairs = sorted(names.items(), key=lambda pair: -len(pair[0]))
        self._publics = sorted(names.items(), key=lambda pair: -len(pair[1]))

    def public(self, text: str) -> str:
        """Return a text in which public names replace the addresses."""
        for url, public in self._pairs:
            text = text.replace(url, public)
        return text

    def local(self, url: str) -> str:
        """Return the address of a public name."""
        for address, public in self._publics:
            for form in (public, public.replace("http://", "https://"), public[len("http://") :]):
                if url == form or url.startswith((form + "/", form + "?")):
                    return address + url[len(form) :]
        return url
