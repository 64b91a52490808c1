"""An agent that lives as long as the run: many episodes at once, in one process, with `aiohttp`.

It asks LONGSTRIDE_EPISODES for its episodes, wherefore it needs `actor.agent_lifetime=run`.
"""

import asyncio
import os
import sys

from aiohttp import ClientSession, TCPConnector

EPISODES = os.environ["LONGSTRIDE_EPISODES"]


async def play(http: ClientSession, task: dict) -> None:
    """Play one episode."""
    headers = {"Authorization": f"Bearer {task['api_key']}"}

    async def call(url: str, body: dict) -> dict:
        async with http.post(url, json=body, headers=headers) as answer:
            return await answer.json() if answer.status == 200 else {}

    messages = task["messages"]
    while True:
        asked = {"model": "policy", "messages": messages}
        reply = await call(task["base_url"] + "/chat/completions", asked)
        if not reply:  # no room for it, or the episode is over: there is a reason on either side
            await call(task["env_url"] + "/end", {})
            return
        said = reply["choices"][0]["message"]["content"]
        result = await call(task["env_url"] + "/step", {"action": said})
        if not result or result["done"] or result["truncated"]:
            return
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": result["observation"]})


async def player(http: ClientSession) -> None:
    """Play one episode after the other; 204 says that there is none at the moment."""
    while True:
        async with http.post(EPISODES) as answer:
            task = await answer.json() if answer.status == 200 else None
        if task is not None:
            await play(http, task)


async def main(num_at_once: int) -> None:
    """Play so many episodes at once until the run is over."""
    async with ClientSession(connector=TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(player(http))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
