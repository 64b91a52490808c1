"""Malformed requests: generated from the OpenAPI document, and bytes on a socket."""

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from schemathesis import GenerationMode

from benchmarks.envhub.hub import Client, ServiceTarget

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
READ_TIMEOUT_S = 10.0
QUIET_S = 0.2  # after which an unfinished request is given up
MAX_ANSWER_BYTES = 1 << 20
NUM_SOCKETS = 48
STRINGS = (
    "",
    "\ud800",
    "\x00\x01\x7f",
    "\u202e\u2603\U0001f600" * 40,
    "a" * 60_000,
    "../../../../etc/passwd",
    "'; DROP TABLE items; --",
    "$(touch /tmp/owned)",
    "__import__('os').system('true')",
    "Action: " * 50,
    "{{7*7}}${7*7}%s%n",
    "-1",
    "NaN",
)
NUMBERS = ("-1", "0", "1.5", "1e999", "-0.0", "9" * 400, "9" * 5000, "NaN", "Infinity", "true")
NESTED = ("[" * 60_000, '{"a":' * 10_000, "[" * 500 + "]" * 500, '{"action":' + "[" * 30_000)
PATH_BYTES = (b"%00", b"%ff%fe", b"..%2f..", b"\xe2\x98\x83", b"?" * 50, b"a" * 9000, b"%", b"")


class Fuzz:
    """Malformed requests to one hub, counted by status; `bad` holds those answered with 5xx."""

    def __init__(self, target: ServiceTarget, document: dict[str, Any]) -> None:
        self.target = target
        self.document = document
        self.statuses: Counter[int] = Counter()
        self.bad: list[str] = []
        self.num_sent = 0

    def count(self, status: int, request: object) -> None:
        """Note one answer; status 0 stands for a connection that was closed without one."""
        self.statuses[status] += 1
        if status >= 500:
            self.bad.append(f"{status}: {request!r:.400}")

    def send_by_schema(self, num_requests: int, *, victims: list[str]) -> None:
        """Send requests that break the OpenAPI document, half of them to live sessions."""
        schema = schemathesis.openapi.from_dict(self.document)
        parsed: list[Any] = list(schema.get_all_operations())
        operations = [each.ok() for each in parsed]
        plans = [(each, None) for each in operations if each.body or each.path_parameters]
        plans += [(each, victim) for each in operations if each.body for victim in victims]
        with requests.Session() as session:
            session.trust_env = False
            session.headers["Authorization"] = f"Bearer {self.target.token}"
            for operation, victim in plans:
                self._send_cases(operation, -(-num_requests // len(plans)), session, victim)

    def _send_cases(
        self, operation: Any, num_requests: int, session: requests.Session, victim: str | None
    ) -> None:
        names = {each.name for each in operation.path_parameters}
        known = {"session_id": victim} if victim and "session_id" in names else None
        # Any text is a well-formed id, so that a route without a body cannot be called against
        # its document: there, ids that exist nowhere are sent.
        mode = GenerationMode.NEGATIVE if operation.body else GenerationMode.POSITIVE
        strategy = operation.as_strategy(mode, path_parameters=known)

        every_check: list[Any] = list(HealthCheck)  # pyright takes a member for the class

        @hypothesis_seed(0)
        @settings(
            max_examples=num_requests, phases=[Phase.generate], suppress_health_check=every_check
        )
        @given(case=strategy)
        def send(case: Any) -> None:
            self.num_sent += 1
            try:
                answer = case.call(self.target.url, session=session, timeout=READ_TIMEOUT_S)
            except requests.exceptions.Timeout:
                raise
            except requests.exceptions.ConnectionError:
                self.count(0, case)
                return
            except ValueError:  # the client library cannot put it on the wire
                self.num_sent -= 1
                return
            self.count(answer.status_code, case)

        send()

    async def send_texts(self, num_texts: int, *, victims: list[str]) -> None:
        """Step live sessions with text that only a broken or a hostile model would write."""
        chance = random.Random(num_texts)
        async with Client(self.target) as client:
            for session_id in victims:
                seq = 1
                for _ in range(num_texts // len(victims)):
                    text = "".join(chance.choices(STRINGS, k=chance.randint(1, 3)))[:60_000]
                    body = {
                        "action": text if chance.random() < 0.8 else _unicode(chance),
                        "seq": seq,
                    }
                    path = f"/v1/sessions/{session_id}/step"
                    status, _ = await client.ask("POST", path, body)
                    self.num_sent += 1
                    self.count(status, body)
                    seq += status == 200

    async def send_bytes(self, num_requests: int, *, victims: list[str]) -> None:
        """Send bytes that are no request, or nearly one, each on a connection of its own."""
        blobs = iter(self._blobs(num_requests, victims))

        async def work() -> None:
            for blob, is_whole in blobs:
                self.num_sent += 1
                for status in await self._exchange(blob, is_whole=is_whole):
                    self.count(status, blob)

        await asyncio.gather(*(work() for _ in range(NUM_SOCKETS)))

    async def _exchange(self, blob: bytes, *, is_whole: bool) -> list[int]:
        """Return the statuses of the answers to `blob`; [0] when there were none.

        Raises:
            TimeoutError: the hub did not answer a whole request in time, or keeps an ended one.
        """
        reader, writer = await asyncio.open_connection(*self.target.address)
        answer = b""
        try:
            writer.write(blob)
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(
                    reader.read(MAX_ANSWER_BYTES), READ_TIMEOUT_S if is_whole else QUIET_S
                )
        except TimeoutError:
            if is_whole:
                raise TimeoutError(f"no answer to {blob!r:.300}") from None
            with contextlib.suppress(OSError):
                writer.write_eof()
                await asyncio.wait_for(reader.read(MAX_ANSWER_BYTES), READ_TIMEOUT_S)
        finally:
            writer.close()
        return [int(code) for code in STATUS.findall(answer)] or [0]

    def _blobs(self, num_requests: int, victims: list[str]) -> Iterator[tuple[bytes, bool]]:
        chance = random.Random(num_requests)
        routes = list(self._routes(victims))
        makers = (_noise, _bad_json, _bad_json, _bad_json, _mutated, _bad_frame, _bad_path)
        for _ in range(num_requests):
            method, path, fields = chance.choice(routes)
            maker = chance.choice(makers)
            yield maker(chance, self.target, method, path, fields), maker is _bad_json

    def _routes(self, victims: list[str]) -> Iterator[tuple[str, str, list[str]]]:
        """Yield method, path and body fields of every route, in live sessions and in none."""
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                fields = self._fields(operation)
                for session_id in (*victims, "none"):
                    yield method.upper(), re.sub(r"\{\w+\}", session_id, path), fields

    def _fields(self, operation: dict[str, Any]) -> list[str]:
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        reference = body.get("schema", {}).get("$ref", "")
        name = reference.rpartition("/")[2]
        schemas = self.document.get("components", {}).get("schemas", {})
        return list(schemas.get(name, {}).get("properties", {})) or ["action", "seq"]


def _unicode(chance: random.Random) -> str:
    return "".join(chr(chance.randrange(0xD800)) for _ in range(chance.randint(1, 400)))


def _head(target: ServiceTarget, method: str, path: str) -> bytes:
    """Return a request up to the value of its last header, the content's length."""
    host, port = target.address
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"authorization: Bearer {target.token}\r\n"
        "content-type: application/json\r\ncontent-length: "
    ).encode()


def _request(target: ServiceTarget, method: str, path: str, body: bytes) -> bytes:
    closing = b"connection: close\r\ncontent-length: "
    head = _head(target, method, path).replace(b"content-length: ", closing)
    return b"%s%d\r\n\r\n%s" % (head, len(body), body)


def _noise(
    chance: random.Random, target: ServiceTarget, method: str, path: str, fields: list[str]
) -> bytes:
    return chance.randbytes(chance.choice((1, 20, 300, 5000)))


def _bad_json(
    chance: random.Random, target: ServiceTarget, method: str, path: str, fields: list[str]
) -> bytes:
    """Return a well-framed request whose body is no JSON, or not what the route wants."""
    kind = chance.random()
    if kind < 0.1:
        body = chance.randbytes(200)
    elif kind < 0.2:
        body = chance.choice(NESTED).encode()
    else:
        values = [_value(chance) for _ in fields]
        pairs = [f"{json.dumps(name)}:{value}" for name, value in zip(fields, values, strict=True)]
        chance.shuffle(pairs)
        body = ("{" + ",".join(pairs[: chance.randint(0, len(pairs))]) + "}").encode()
    return _request(target, method, path, body)


def _value(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.45:
        return json.dumps(chance.choice(STRINGS))
    if kind < 0.6:
        return chance.choice(("1", "2", "3", "4"))
    if kind < 0.8:
        return chance.choice(NUMBERS)
    return chance.choice(
        ("null", "[]", "{}", '[{"action":1}]', '["a"]', '"textcraft"', '"\\ud800"')
    )


def _mutated(
    chance: random.Random, target: ServiceTarget, method: str, path: str, fields: list[str]
) -> bytes:
    """Return a good request with some bytes changed, dropped or doubled."""
    body = json.dumps(dict.fromkeys(fields, "textcraft") | {"seq": 1}).encode()
    blob = bytearray(_request(target, method, path, body))
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(blob))
        kind = chance.randrange(3)
        if kind == 0:
            blob[at] = chance.randrange(256)
        elif kind == 1:
            del blob[at : at + chance.randint(1, 9)]
        else:
            blob[at:at] = blob[at : at + chance.randint(1, 50)]
    return bytes(blob)


def _bad_frame(
    chance: random.Random, target: ServiceTarget, method: str, path: str, fields: list[str]
) -> bytes:
    """Return a request whose length, encoding or headers lie."""
    head = _head(target, method, path).replace(b"content-length: ", b"")
    body = b'{"action":"inventory","seq":1}'
    return head + chance.choice(
        (
            b"content-length: -5\r\n\r\n" + body,
            b"content-length: 99999999999999999999\r\n\r\n" + body,
            b"content-length: 10\r\n\r\n" + body,
            b"content-length: 500\r\n\r\n" + body,
            b"content-length: 7, 9\r\n\r\n" + body,
            b"content-length: 30\r\ncontent-length: 3\r\n\r\n" + body,
            b"content-length: \xff\r\n\r\n" + body,
            b"transfer-encoding: chunked\r\n\r\nzz\r\n" + body,
            b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body,
            b"transfer-encoding: chunked\r\n\r\n1e\r\n" + body + b"\r\n0\r\n\r\n",
            b"transfer-encoding: chunked\r\n\r\n" + b"2710\r\n%s\r\n" % (b"a" * 10_000) * 8,
            b"transfer-encoding: gzip\r\n\r\n" + body,
            b"content-encoding: gzip\r\ncontent-length: 30\r\n\r\n" + body,
            b"expect: 100-continue\r\ncontent-length: 30\r\n\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            b"x: %s\r\n\r\n" % (b"y" * 100_000),
            b"x: y\r\n" * 2000 + b"\r\n",
            b"content-length: 100000\r\n\r\n" + b"a" * 100_000,
            b"\r\n\r\n",
        )
    )


def _bad_path(
    chance: random.Random, target: ServiceTarget, method: str, path: str, fields: list[str]
) -> bytes:
    """Return a request for a path, by a method, that is not there."""
    wild = path.encode() + b"/" + chance.choice(PATH_BYTES)
    at = chance.randrange(1, len(wild))
    wild = wild[:at] + chance.choice(PATH_BYTES) + wild[at:]
    verb = chance.choice((b"GET", b"PUT", b"PATCH", b"OPTIONS", b"TRACE", b"get", b"", b"A" * 40))
    blob = _request(target, "POST", "/", b"{}")
    return blob.replace(b"POST / ", verb + b" " + wild + b" ", 1)


async def fetch_document(target: ServiceTarget) -> dict[str, Any]:
    """Return the hub's OpenAPI document."""
    async with Client(target) as client:
        return await client.want(200, "GET", "/openapi.json")
