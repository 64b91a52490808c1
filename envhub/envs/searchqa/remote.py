"""Client of an external retrieval server, in the form that Search-R1's server speaks."""

import http.client
import json
import time
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from common.text import json_bytes, valid_text
from envhub.env import EnvFailure
from envhub.envs.searchqa.passages import Passage, make_passage

MAX_REPLY_BYTES = 8 << 20
READ_BYTES = 1 << 16


class RemoteRetriever:
    """Asks `POST <url>` {queries, topk, return_scores}. Holds no connection between queries.

    Proxies of the environment are not used: a retrieval server stands near.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """A `url` without a path gets `/retrieve`.

        Raises: ValueError: not an http or https URL.
        """
        self._url = parse_url(url)
        self._timeout_s = timeout_s

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """Return what the server found, in its order; see `Retriever.search`."""
        asked = {"queries": [valid_text(query)], "topk": num_passages, "return_scores": True}
        try:
            reply = self._post(json_bytes(asked))
            return read_reply(reply)[:num_passages]
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise EnvFailure(f"retrieval server {self._url.geturl()}: {reason}") from error

    def _post(self, body: bytes) -> bytes:
        """Return the body of the answer; the whole exchange has one deadline."""
        deadline_s = time.monotonic() + self._timeout_s
        is_https = self._url.scheme == "https"
        make = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        connection = make(self._url.hostname or "", self._url.port, timeout=self._timeout_s)
        try:
            path = self._url.path + (f"?{self._url.query}" if self._url.query else "")
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            transport = connection.sock
            transport.settimeout(_left_s(deadline_s))
            response = connection.getresponse()
            content = bytearray()
            while chunk := response.read1(READ_BYTES):
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise ValueError(f"the answer is longer than {MAX_REPLY_BYTES} bytes")
                transport.settimeout(_left_s(deadline_s))
            if response.status != 200:
                raise ValueError(f"status {response.status}: {bytes(content[:200])!r}")
            if response.length:
                raise ValueError(f"the answer breaks off, {response.length} bytes are missing")
            return bytes(content)
        finally:
            connection.close()


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def parse_url(url: str) -> SplitResult:
    """Return the parts of a retrieval server's URL.

    Raises: ValueError: not an http or https URL with a host.
    """
    parts = urlsplit(url)
    _ = parts.port  # raises when it is no number
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://HOST:PORT/retrieve")
    return parts._replace(path="/retrieve") if parts.path in ("", "/") else parts


def read_reply(reply: bytes) -> list[Passage]:
    """Return the passages of an answer, {"result": [[{"document": {...}, "score": s}, ...]]}.

    The documents may also stand there bare, as without `return_scores`.

    Raises: ValueError: not of that form.
    """
    parsed = json.loads(reply)
    results = parsed.get("result") if isinstance(parsed, Mapping) else None
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], list):
        raise ValueError("the answer is not {'result': [[...]]} with one list for one query")
    return [
        make_passage(one.get("document", one) if isinstance(one, Mapping) else one)
        for one in results[0]
    ]
