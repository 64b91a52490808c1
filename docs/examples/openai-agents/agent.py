"""Answers the questions of a dataset with OpenAI's Agents SDK, the package `openai-agents`.

The process plays many episodes at once and needs `actor.agent_lifetime=run`. The argument is their
number.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError

EPISODES = os.environ["LONGSTRIDE_EPISODES"]


def post(url: str, key: str = "", body: dict | None = None) -> dict:
    """Post JSON and return the answer, {} for an empty one."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body or {}).encode(), headers)) as answer:
        return json.loads(answer.read() or b"{}")


async def play(task: dict) -> None:
    """Play one episode: run the agent, and send its output to the environment as an action."""
    policy = AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"])
    model = OpenAIChatCompletionsModel(model="policy", openai_client=policy)
    agent = Agent(name="solver", model=model)  # Instructions and tools of your own belong here.
    messages = task["messages"]
    try:
        while True:
            result = await Runner.run(agent, messages)
            body = {"action": result.final_output}
            step = await asyncio.to_thread(post, f"{task['env_url']}/step", task["api_key"], body)
            if step["done"] or step["truncated"]:
                return
            reply = {"role": "user", "content": step["observation"]}
            messages = [*result.to_input_list(), reply]
    except BadRequestError:  # The context is full. The actor records this.
        await asyncio.to_thread(post, f"{task['env_url']}/end", task["api_key"])
    finally:
        await policy.close()


async def player() -> None:
    """Play one episode after the other. An empty answer means that no episode is available."""
    while True:
        if task := await asyncio.to_thread(post, EPISODES):
            await play(task)


async def main(num_at_once: int) -> None:
    """Play this number of episodes at once, until the run ends."""
    set_tracing_disabled(True)  # Traces would be sent to OpenAI.
    threads = ThreadPoolExecutor(2 * num_at_once)  # Each request of `post` waits in one of them.
    asyncio.get_running_loop().set_default_executor(threads)
    await asyncio.gather(*(player() for _ in range(num_at_once)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
