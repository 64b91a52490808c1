"""Plays tasks of verifiers with its own interpreter; envhub/interop/verifiers_taskset.py starts it.

Both directions use lines of JSON. The first input line is the configuration; the answer is
{"ready": [train, test]}. Later inputs are {"start": episode, "split", "index"}, {"answer": episode,
"message"} and {"end": episode}. Outputs are {"episode", "ask": messages, "tools"}, then {"episode",
"paid": {...}} or {"episode", "error"}.
"""

import asyncio
import itertools
import json
import os
import sys
import traceback
from collections import deque
from functools import partial
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from aiohttp import web

MAX_LINE_BYTES = 64 << 20
OWN_HARNESS = "longstride_chat"
TAKEN_OVER = ("", "bash", "null")  # Chat loops that are replaced by the one in this process.


class TasksetPlayer:
    """The running episodes, and the model endpoint that they use."""

    def __init__(self, options: dict[str, Any], out: Any) -> None:
        self._options = options
        self._out = out
        self._env = vf.load_environment(env_config(options))
        most = options["max_items"]
        self._tasks = {"train": list(itertools.islice(self._env.taskset, most)), "test": []}
        if options["test"]:
            config = env_config(options | {"taskset": options["taskset"] | options["test"]})
            tests = vf.load_taskset(config.taskset)
            self._tasks["test"] = list(itertools.islice(tests, most))
        else:
            tasks = self._tasks["train"]
            num = options["num_test"]
            num = -(-len(tasks) // 10) if num < 0 else min(num, len(tasks))
            cut = len(tasks) - num
            self._tasks = {"train": tasks[:cut], "test": tasks[cut:]}
        self._running: dict[str, asyncio.Task[None]] = {}
        # Open requests of each episode in order, with the line of each. The policy has the first.
        self._asked: dict[str, deque[tuple[asyncio.Future[dict[str, Any]], dict[str, Any]]]] = {}
        self._host = ""
        self._port = 0

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Play until the input ends."""
        app = web.Application(client_max_size=MAX_LINE_BYTES)
        app.router.add_post("/{episode}/v1/chat/completions", self.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        except OSError:  # This machine has no IPv4.
            await web.TCPSite(runner, "::1", 0).start()
        host, self._port = runner.addresses[0][:2]
        self._host = f"[{host}]" if ":" in host else host
        async with self._env.serving():
            self.say({"ready": [len(self._tasks["train"]), len(self._tasks["test"])]})
            while line := await lines.readline():
                self.take(json.loads(line))
            running = [*self._running.values()]
            self._running.clear()
            for task in running:
                task.cancel()
        await runner.cleanup()

    def take(self, order: dict[str, Any]) -> None:
        """Process one input line."""
        if "start" in order:
            task = self._tasks[order["split"]][order["index"]]
            playing = asyncio.create_task(self.play(order["start"], task))
            self._running[order["start"]] = playing
            self._asked[order["start"]] = deque()
            playing.add_done_callback(partial(self.end, order["start"]))
        elif "answer" in order:
            requests = self._asked.get(order["answer"])
            if requests:
                answer, _ = requests.popleft()
                if not answer.done():
                    answer.set_result(order["message"])
                if requests:
                    self.say(requests[0][1])
        elif (playing := self._running.pop(order["end"], None)) is not None:
            playing.cancel()

    async def play(self, episode: str, task: vf.Task) -> None:
        """Play an episode to its end, and report its reward or its failure."""
        url = f"http://{self._host}:{self._port}/{episode}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="LONGSTRIDE_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        finished = await self._env.run_episode(task, context)
        self.say({"episode": episode, **self.judged(finished, url)})

    def end(self, episode: str, playing: asyncio.Task[None]) -> None:
        """Cancel open requests of an ended episode; report its error, unless the hub ended it."""
        for answer, _ in self._asked.pop(episode):
            answer.cancel()
        is_wanted = self._running.pop(episode, None) is not None
        if playing.cancelled():
            error = "the episode was cancelled by its taskset"
        elif (raised := playing.exception()) is not None:
            traceback.print_exception(raised)
            error = f"{type(raised).__name__}: {raised}"
        else:
            return
        if is_wanted:
            self.say({"episode": episode, "error": error})

    def judged(self, finished: vf.Episode, url: str) -> dict[str, Any]:
        """Return the reward of the policy's only trace; or an error, which is never a reward."""
        errors = [*finished.errors, *(e for trace in finished.traces for e in trace.errors)]
        if errors or not finished.ok:
            last = errors[-1] if errors else None
            return {
                "error": f"{last.type}: {last.message}"
                if last
                else "the episode did not end normally"
            }
        ours = [t for t in finished.traces if (c := t.agent.config.client) and c.base_url == url]
        if seat := self._options["seat"]:
            ours = [trace for trace in ours if trace.agent.name == seat]
        if len(ours) != 1:
            return {"error": self.why_not_one([trace.agent.name for trace in ours])}
        values = {name: reward and reward.value for name, reward in ours[0].rewards.items()}
        missing = [name for name, value in values.items() if value is None]
        if missing or not values:
            return {"error": f"no reward: {', '.join(missing) or 'the task has none'}"}
        paid: dict[str, Any] = {"reward": ours[0].reward, "is_truncated": ours[0].is_truncated}
        if success := self._options["success"]:
            score = {**ours[0].metrics, **values}.get(success)
            if score is None:
                return {"error": f"success={success}: no such metric or reward"}
            paid["is_success"] = score >= 1.0
        return {"paid": paid}

    def why_not_one(self, seats: list[str]) -> str:
        """Return why the traces of these seats are not the policy's only one."""
        if not seats:
            seat = f" with the seat {seat}" if (seat := self._options["seat"]) else ""
            return f"the episode has no trace of the policy{seat}"
        names = ", ".join(sorted({*seats}))
        if len({*seats}) > 1:
            return f"the seats of the policy are {names}; set `seat` to one of them"
        return f"the seat {names} has {len(seats)} traces; an episode of the policy has one"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Forward a model request to the policy and return its answer.

        Parallel requests of an episode, as of its subagents, become successive turns.
        """
        episode, body = request.match_info["episode"], await request.json()
        requests = self._asked.get(episode)
        if requests is None:
            return web.json_response({"error": "the episode has ended"}, status=410)
        line = {"episode": episode, "ask": body["messages"], "tools": body.get("tools", [])}
        answer = asyncio.get_running_loop().create_future()
        requests.append((answer, line))
        if len(requests) == 1:
            self.say(line)
        message = {"role": "assistant", **await answer}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        reply = {"id": "1", "created": 1, "model": "policy"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response(reply | {"object": "chat.completion", "choices": [choice]})
        for number, call in enumerate(message.get("tool_calls", ())):
            call["index"] = number
        reply["object"] = "chat.completion.chunk"
        parts = [{"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": reason}]
        chunks = [json.dumps(reply | {"choices": [{"index": 0, **part}]}) for part in parts]
        text = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream")

    def say(self, line: dict[str, Any]) -> None:
        """Write one line immediately."""
        self._out.write(f"{json.dumps(line)}\n")
        self._out.flush()


def env_config(options: dict[str, Any]) -> vf.EnvConfig:
    """Return the environment's configuration, with the policy's seats played by this process.

    A seat keeps its configured options, a harness of its own, and a container runtime.
    """
    settings = {**options["env"], "taskset": options["taskset"]}
    taskset = options["taskset"]["id"]
    form = vf.env_config_type(taskset, settings.get("id", ""))
    default_harness = vf.default_harness_id(taskset)
    for name, field in form.model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        seat = settings[name] = dict(settings.get(name, {}))
        pinned = field.default.harness.id if field.default.harness is not None else default_harness
        if pinned in TAKEN_OVER:
            seat.setdefault("harness", {"id": OWN_HARNESS})
        if isinstance(field.default.runtime, vf.PrimeConfig):
            seat.setdefault("runtime", {"type": "subprocess"})
    return vf.resolve_env_config(settings)


async def main() -> None:
    """Read the configuration, then play."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Output of a taskset belongs in the log.
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    options = json.loads(await lines.readline())
    await TasksetPlayer(options, out).serve(lines)


if __name__ == "__main__":
    asyncio.run(main())
