"""An agent that owns its loop: it asks the policy with the `openai` package, and acts."""

import json
import os
from urllib.request import Request, urlopen

from openai import OpenAI

ENV, KEY = os.environ["LONGSTRIDE_ENV"], os.environ["OPENAI_API_KEY"]


def call(path: str, body: dict[str, str] | None = None) -> dict:
    """Ask the episode's environment."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urlopen(Request(ENV + path, data, headers)) as answer:
        return json.load(answer)


def main() -> None:
    """Play one episode."""
    policy = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages = call("")["messages"]
    while True:
        reply = policy.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message.content or ""
        result = call("/step", {"action": said})
        if result["done"] or result["truncated"]:
            return
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": result["observation"]})


if __name__ == "__main__":
    main()
