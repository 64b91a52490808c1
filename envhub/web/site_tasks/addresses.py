"""Addresses of sites: where a task begins, which may be visited, and what agents see for them."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit


def start_urls(task: Mapping[str, Any]) -> list[str]:
    """Return the addresses of the tabs that a task begins with."""
    return [url.strip() for url in task["start_url"].split("|AND|")]


def may_go(hosts: set[str]) -> Callable[[str], bool]:
    """Return a test of whether an address lies on one of these hosts, ports included."""

    def test(url: str) -> bool:
        try:
            parts = urlsplit(url)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() in hosts

    return test


class PublicNames:
    """Translates between the sites' addresses and the public names that agents see.

    Args:
        names: public name by address, both without a trailing slash; {}: agents see the addresses.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        # The longest first: one site may lie below another.
        self._pairs = sorted(names.items(), key=lambda pair: -len(pair[0]))
        self._publics = sorted(names.items(), key=lambda pair: -len(pair[1]))

    def public(self, text: str) -> str:
        """Return a text with the public names for the addresses in it."""
        for url, public in self._pairs:
            text = text.replace(url, public)
        return text

    def local(self, url: str) -> str:
        """Return the address that a public name stands for."""
        for address, public in self._publics:
            for form in (public, public.replace("http://", "https://"), public[len("http://") :]):
                if url == form or url.startswith((form + "/", form + "?")):
                    return address + url[len(form) :]
        return url
