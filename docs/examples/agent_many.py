"""A long-lived agent: one process plays many episodes at once. It needs no package.

It requests episodes from LONGSTRIDE_EPISODES, so it needs `actor.agent_lifetime=run`.
"""

import asyncio
import json
import os
import sys
from urllib.parse import urlsplit

EPISODES = os.environ["LONGSTRIDE_EPISODES"]
SERVER = urlsplit(EPISODES)


class Connection:
    """A kept-alive connection of one player."""

    async def open(self) -> None:
        """Connect, with TLS for https. The variable SSL_CERT_FILE names other trusted roots."""
        is_tls = True if SERVER.scheme == "https" else None
        self.reader, self.writer = await asyncio.open_connection(
            SERVER.hostname, SERVER.port, ssl=is_tls
        )

    async def call(self, url: str, key: str = "", body: dict | None = None) -> dict:
        """Post JSON; return the answer, or {} for a refusal or an empty answer."""
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
        await self.call(f"{env}/end", key)  # The context is full. The actor records this.


async def player() -> None:
    """Play one episode after the other. An empty answer means that no episode is available."""
    connection = Connection()
    await connection.open()
    while True:
        if task := await connection.call(EPISODES):
            await connection.play(task)


async def main(num_at_once: int) -> None:
    """Play this number of episodes at once, until the run ends."""
    await asyncio.gather(*(player() for _ in range(num_at_once)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
