"""Servers of asyncio that end while clients connect."""

import asyncio
from collections.abc import Iterable


async def stop_accepting(listeners: Iterable[int]) -> None:
    """Accept no further connection; each accepted one gets its transport.

    Call it before a server is closed, and `asyncio.sleep(0)` afterwards, so that each transport
    calls `connection_made`. Otherwise such a connection is never closed: asyncio leaks it, and
    uvloop waits for it forever.

    Args:
        listeners: descriptors of the server's sockets, which stay open.
    """
    loop = asyncio.get_running_loop()
    if any([loop.remove_reader(each) for each in listeners]):  # uvloop removes nothing.
        await asyncio.sleep(0)
