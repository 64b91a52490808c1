"""Client of an external retrieval server with Search-R1's protocol."""

import json
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from common.http.blocking import request
from common.text import json_bytes, valid_text
from envhub.env import EnvFailure
from envhub.envs.searchqa.passages import Passage, make_passage

MAX_REPLY_BYTES = 8 << 20


class RemoteRetriever:
    """Sends `POST <url>` {queries, topk, return_scores}. No connection stays open between queries.

    For a server on another machine, the proxy of the process environment is used.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Parse `url`; without a path it gets `/retrieve`.

        Raises: ValueError: not an http or https URL.
        """
        self._url = parse_url(url)
        self._timeout_s = timeout_s

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """Return the server's passages, in its order; see `Retriever.search`."""
        asked = {"queries": [valid_text(query)], "topk": num_passages, "return_scores": True}
        try:
            reply = self._post(json_bytes(asked))
            return read_reply(reply)[:num_passages]
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise EnvFailure(f"retrieval server {self._url.geturl()}: {reason}") from error

    def _post(self, body: bytes) -> bytes:
        """Return the body of the answer. One deadline covers the whole exchange."""
        answer = request(
            self._url.geturl(),
            method="POST",
            body=body,
            headers={"Content-Type": "application/json"},
            timeout_s=self._timeout_s,
            max_bytes=MAX_REPLY_BYTES,
        )
        if answer.status != 200:
            raise ValueError(f"status {answer.shown}: {answer.body[:200]!r}")
        return answer.body


def parse_url(url: str) -> SplitResult:
    """Return the parts of a retrieval server's URL.

    Raises: ValueError: not an http or https URL with a host.
    """
    parts = urlsplit(url)
    _ = parts.port  # Raises ValueError if the port is no number.
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://HOST:PORT/retrieve")
    return parts._replace(path="/retrieve") if parts.path in ("", "/") else parts


def read_reply(reply: bytes) -> list[Passage]:
    """Return the passages of an answer, {"result": [[{"document": {...}, "score": s}, ...]]}.

    Bare documents, as without `return_scores`, are accepted too.

    Raises: ValueError: another format.
    """
    parsed = json.loads(reply)
    results = parsed.get("result") if isinstance(parsed, Mapping) else None
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], list):
        raise ValueError("the answer is not {'result': [[...]]} with one list for one query")
    return [
        make_passage(one.get("document", one) if isinstance(one, Mapping) else one)
        for one in results[0]
    ]
