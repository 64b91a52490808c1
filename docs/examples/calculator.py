"""A server of MCP tools, for docs/ELSEWHERE.md. Each session has a sum and a goal for the sum."""

import json
import uuid
from typing import Any

from mcp.server import MCPServer  # pyright: ignore[reportMissingImports]

server = MCPServer("calculator")
sums: dict[str, list[int]] = {}


@server.tool()
def begin(start: int, goal: int) -> dict[str, str]:
    """Begin a session."""
    session = uuid.uuid4().hex
    sums[session] = [start, goal]
    return {"session": session, "observation": f"The sum is {start}."}


@server.tool()
def add(session: str, number: int) -> str:
    """Add a number from 1 to 9 to the sum."""
    if not 1 <= number <= 9:
        raise ValueError("only numbers from 1 to 9")
    sums[session][0] += number
    return f"The sum is {sums[session][0]}."


@server.tool()
def submit(session: str) -> dict[str, Any]:
    """Submit the sum as the answer."""
    total, goal = sums.pop(session)
    return {"reward": 1.0 if total == goal else 0.0, "is_success": total == goal}


@server.resource("tasks://all")
def tasks() -> str:
    """Return a hundred goals."""
    items = [
        {"prompt": f"Make the sum {goal}.", "arguments": {"start": goal // 2, "goal": goal}}
        for goal in range(1, 101)
    ]
    return json.dumps(items)


if __name__ == "__main__":
    server.run()
