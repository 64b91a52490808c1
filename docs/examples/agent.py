"""An agent with its own loop. It samples the policy with the `openai` package.

With `actor.agent_lifetime=episode` the process plays one episode. With `actor.agent_lifetime=run`
it plays 16 episodes at once, until the run ends.
"""

import json
import os
from threading import Thread
from urllib.request import Request, urlopen

from openai import BadRequestError, OpenAI


def call(url: str, key: str = "", body: dict[str, str] | None = None) -> dict:
    """Send a request to the environment, or to the address of episodes."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, data, headers)) as answer:
        return json.loads(answer.read() or b"{}")


def play(policy: OpenAI, env: str, messages: list) -> None:
    """Play one episode."""
    while True:
        reply = policy.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message.content or ""
        result = call(f"{env}/step", policy.api_key, {"action": said})
        if result["done"] or result["truncated"]:
            return
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": result["observation"]})


def play_many(episodes: str, policy: OpenAI) -> None:
    """Play one episode after the other. An empty answer means that no episode is available."""
    while True:
        if task := call(episodes, body={}):
            client = policy.with_options(base_url=task["base_url"], api_key=task["api_key"])
            try:
                play(client, task["env_url"], task["messages"])
            except BadRequestError:  # The context is full. The actor records this.
                call(task["env_url"] + "/end", task["api_key"], {})


if __name__ == "__main__":
    if episodes := os.environ.get("LONGSTRIDE_EPISODES"):
        policy = OpenAI(base_url=episodes, api_key="replaced for each episode")
        for _ in range(16):
            Thread(target=play_many, args=(episodes, policy)).start()
    else:  # The package reads OPENAI_BASE_URL and OPENAI_API_KEY.
        env, policy = os.environ["LONGSTRIDE_ENV"], OpenAI()
        play(policy, env, call(env, policy.api_key)["messages"])
