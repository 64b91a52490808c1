"""Law of SECURITY.md: its limits are those of the code."""

from actor.agents import http as agents_http
from actor.agents import strangers
from common.http import serving
from common.repository import ROOT
from common.wire import sockets
from common.wire.access import bounds, connections, peers
from envhub.sandbox import serve

MIB = 1 << 20


def test_limits_of_the_security_page_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    handshake = f"{connections.MAX_HANDSHAKE_BYTES >> 10} KiB, {connections.HANDSHAKE_S:g} s"
    frame, message = bounds.MAX_FRAME_BYTES // MIB, bounds.MAX_MESSAGE_BYTES // MIB
    of_address = f"{strangers.MAX_STRANGERS} at once, {strangers.MAX_OF_ADDRESS} of an address"
    first_byte, tls = strangers.FIRST_BYTE_S, strangers.HANDSHAKE_S
    limits = [
        f"| unauthenticated connection | {handshake}, {connections.MAX_PENDING:,} at once",
        f"| frame, message | {frame} MiB, {message} MiB |",
        f"loses answers, and its connection after {sockets.UNREAD_MS // 1000} s",
        f"After {peers.MAX_REFUSALS} refused messages a connection is not read",
        f"is not read for {peers.MUTED_S:g} s",
        f"headers | {serving.MAX_HEADER_BYTES >> 10} KiB |",
        f"arrival of a request | {serving.REQUEST_S:g} s |",
        f"a silent or half-sent request {serving.REQUEST_S:g} s",
        f"{serve.MAX_FILE_BYTES // MIB} MiB within {serve.BODY_S:g} s",
        f"a body of {agents_http.MAX_BODY_BYTES // MIB} MiB within {agents_http.BODY_S:g} s",
        of_address,
        f"first byte {first_byte:g} s, handshake of TLS {tls:g} s, valid key {strangers.KEY_S:g} s",
    ]
    assert [limit for limit in limits if limit not in text] == []
