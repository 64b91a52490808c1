"""A taskset whose tasks are the items of a hub. The hub plays the user over its HTTP routes."""

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf


class HubConfig(vf.TasksetConfig):
    """The address of the hub, and the items that are the tasks."""

    url: str = "http://127.0.0.1:8080"
    env: str = "babyai"
    split: str = "test"
    style: str = "agentgym"


class HubData(vf.TaskData):
    """An item of the hub, and the beginning of its conversation."""

    url: str
    session: dict[str, str]
    instruction: str


class HubTask(vf.Task[HubData]):
    """An item. Its reward comes from the hub."""


class HubEnvConfig(vf.EnvConfig):
    """The options of the only agent: a chat loop without tools and a limit of turns."""

    agent: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null"}, runtime={"type": "subprocess"}, max_turns=20
    )


class HubEnv(vf.Env[HubEnvConfig]):
    """The agent's replies are actions; observations are the user's turns."""

    async def run(self, task: HubTask, agents: vf.Agents) -> None:
        """Play one item. The trace gets its last reward and its success."""
        data = task.data
        reply = {"reward": 0.0, "is_success": False}
        async with httpx.AsyncClient(base_url=data.url, timeout=60.0, trust_env=False) as hub:
            opened = await post(hub, "/v1/sessions", data.session)
            path, seq = f"/v1/sessions/{opened['session_id']}", 0
            try:
                async with agents.agent.interaction(task) as interaction:
                    text = f"{data.instruction}\n\n{opened['observation']}".strip()
                    segment = await interaction.turn(text)
                    while not segment.terminated:
                        seq += 1
                        step = {"action": segment.last_reply, "seq": seq}
                        reply = await post(hub, f"{path}/step", step)
                        if reply["done"]:
                            break
                        segment = await interaction.turn(reply["observation"])
            finally:
                await hub.delete(path)
        if interaction.trace.ok:  # A missing answer of the model is not a failure of the policy.
            interaction.trace.record_reward("hub_reward", reply["reward"])
            interaction.trace.record_metric("success", float(reply["is_success"]))


async def post(hub: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the hub's answer. A failed request fails the episode and gives no reward."""
    answer = await hub.post(path, json=body)
    if answer.is_error:
        raise vf.EnvError(f"{path}: {answer.status_code}: {answer.text[:500]}")
    return answer.json()


class HubTaskset(vf.Taskset[HubTask, HubConfig]):
    """The items of one split of one environment of the hub."""

    def load(self) -> Iterator[HubTask]:
        """Yield the items in the hub's order."""
        config, start = self.config, 0
        catalogue = httpx.get(f"{config.url}/v1/envs", trust_env=False).raise_for_status().json()
        instruction = catalogue[config.env]["instruction"][config.style]
        url = f"{config.url}/openenv/{config.env}/{config.env}/task_range"
        while True:
            asked = {"split": config.split, "start": start, "stop": start + 100}
            answer = httpx.post(url, json=asked, trust_env=False)
            tasks = answer.raise_for_status().json()["tasks"]
            for task in tasks:
                item = {"env": config.env, "item_id": task["id"], "style": config.style}
                data = HubData(
                    id=task["id"],
                    name=task["id"],
                    url=config.url,
                    session=item,
                    instruction=instruction,
                )
                yield HubTask(data, config.task)
            if not tasks:
                return
            start += len(tasks)
