"""Plays tasks of a terminal with mini-swe-agent 2. Its commands run in the sandbox of the hub.

The process plays many episodes at once and needs `actor.agent_lifetime=run`. The arguments are a
configuration of mini-swe-agent and the number of episodes at once.
"""

import json
import logging
import os
import re
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

# Neither a file of the user nor a message of the start changes an episode.
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "3")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # No request to other servers.

import yaml
from litellm.exceptions import ContextWindowExceededError
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

EPISODES = os.environ["LONGSTRIDE_EPISODES"]
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent's word for the end.


def post(url: str, key: str = "", body: dict | None = None) -> dict:
    """Post JSON and return the answer, {} for an empty one."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body or {}).encode(), headers)) as answer:
        return json.loads(answer.read() or b"{}")


class EpisodeSandbox:
    """An environment of mini-swe-agent: each command is a step of the episode."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.config: dict[str, Any] = {}
        self.is_over = False
        self._url = f"{task['env_url']}/step"
        self._key = task["api_key"]

    def step(self, action: str) -> dict[str, Any]:
        """Send an action of the environment."""
        result = post(self._url, self._key, {"action": action})
        self.is_over = result["done"] or result["truncated"]
        return result

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command. The environment's own limits apply instead of `timeout`."""
        command = action["command"]
        is_end = SUBMIT in command
        said = self.step("submit" if is_end else f"```bash\n{command}\n```")["observation"]
        if self.is_over:
            extra = {"exit_status": "Submitted", "submission": said}
            raise Submitted({"role": "exit", "content": said, "extra": extra})
        code = re.search(r"\[exit code (-?\d+)\]$", said)
        return {"output": said, "returncode": int(code[1]) if code else 0, "exception_info": ""}

    def get_template_vars(self, **values: Any) -> dict[str, Any]:
        """Return the values for mini-swe-agent's templates."""
        return values

    def serialize(self) -> dict[str, Any]:
        """Return nothing: the actor records the episode."""
        return {}


def play(task: dict[str, Any], config: dict[str, Any]) -> None:
    """Play one episode. The tests decide at its end, also without a submission."""
    access = {"api_base": task["base_url"], "api_key": task["api_key"]}
    model_config = {
        **config["model"],
        "model_kwargs": {**config["model"]["model_kwargs"], **access},
    }
    sandbox = EpisodeSandbox(task)
    agent = DefaultAgent(LitellmTextbasedModel(**model_config), sandbox, **config["agent"])
    with suppress(ContextWindowExceededError):  # The tests decide about the work so far.
        agent.run(task["observation"])
    if not sandbox.is_over:
        sandbox.step("submit")


def player(config: dict[str, Any]) -> None:
    """Play one episode after the other. An empty answer means that no episode is available."""
    while True:
        if task := post(EPISODES):
            try:
                play(task, config)
            except Exception as error:  # noqa: BLE001 - the episode fails, and others continue
                complain(task, error)


def complain(task: dict[str, Any], error: Exception) -> None:
    """Report an error to the actor, unless the episode has ended."""
    try:
        post(f"{task['env_url']}/end", task["api_key"], {"error": f"{error!r:.500}"})
    except OSError as late:
        logging.warning("the episode has ended: %s; %.500r", late, error)


if __name__ == "__main__":
    settings = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    players = [threading.Thread(target=player, args=(settings,)) for _ in range(int(sys.argv[2]))]
    for thread in players:
        thread.start()
    for thread in players:  # litellm samples no more once the main thread has ended.
        thread.join()
