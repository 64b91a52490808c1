"""Reads HTTP requests for chat completions, and answers errors of HTTP as the API does."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from actor.api.requests import ApiError, openai_error
from common.host.loopback import IPV4, IPV6


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises: ApiError."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_body", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_body", "the body is not a JSON object")
    return cast(dict[str, Any], body)


@web.middleware
async def with_api_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of HTTP, such as an unknown path, in the API's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        code = HTTPStatus(error.status).phrase.lower().replace(" ", "_")
        text = f"{request.method} {request.path}: {error.text or error.reason}"
        body = openai_error(ApiError(error.status, code, text))
        allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
        return web.json_response(body, status=error.status, headers=allowed)


def is_of_a_page(headers: Mapping[str, str], host: str | None) -> bool:
    """Return whether a request may come from a website in a browser (DNS rebinding included).

    Args:
        host: the host that the request names.
    """
    return "origin" in headers or host not in (IPV4, IPV6, "localhost")
