"""An agent that lives as long as the run: many episodes at once in one process, no package needed.

It asks LONGSTRIDE_EPISODES for its episodes, wherefore it needs `actor.agent_lifetime=run`.
"""

import asyncio
import json
import os
import sys
from urllib.parse import urlsplit

EPISODES = os.environ["LONGSTRIDE_EPISODES"]
SERVER = urlsplit(EPISODES)


class Connection:
    """A connection that is kept; one player's."""

    async def open(self) -> None:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection(SERVER.hostname, SERVER.port)

    async def call(self, url: str, key: str = "", body: dict | None = None) -> dict:
        """Post JSON; return what is answered, {} for a refusal or nothing."""
        path, sent = urlsplit(url).path, json.dumps(body or {}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {SERVER.netloc}\r\nAuthorization: Bearer {key}\r\n"
        self.writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines if line)
        answer = await self.reader.readexactly(int(headers.get(b"content-length", 0)))
        return json.loads(answer) if b" 200 " in status else {}

    async def play(self, task: dict) -> None:
        """Play one episode."""
        base, env, key, messages = (
            task[name] for name in ("base_url", "env_url", "api_key", "messages")
        )
        while reply := await self.call(f"{base}/chat/completions", key, {"messages": messages}):
            said = reply["choices"][0]["message"]["content"]
            result = await self.call(f"{env}/step", key, {"action": said})
            if not result or result["done"] or result["truncated"]:
                return
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": result["observation"]})
        await self.call(f"{env}/end", key)  # no room for it, which our side knows


async def player() -> None:
    """Play one episode after the other; no answer says that there is none at the moment."""
    connection = Connection()
    await connection.open()
    while True:
        if task := await connection.call(EPISODES):
            await connection.play(task)


async def main(num_at_once: int) -> None:
    """Play so many episodes at once until the run is over."""
    await asyncio.gather(*(player() for _ in range(num_at_once)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
