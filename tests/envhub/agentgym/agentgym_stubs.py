"""Small servers in the shapes of AgentGym's dialects, for driving them without AgentGym."""

import asyncio
import json
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse, Response

TOOLS = ("weather", "movie", "academia", "todo", "sheet")


class Stub:
    """A server whose episode ends with success at the action `good`; it keeps what it was sent.

    `fault` makes the next step fail: "status", "error" or "text" of no JSON.
    """

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.num_created = 0
        self.num_closed = 0
        self.resets: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.fault = ""
        self.is_gone = False  # WebArena's browser
        self.observation = ""  # BabyAI's step answers.
        self.score = 0.0  # Score in the answers to BabyAI's steps.
        self.app = FastAPI()
        if dialect == "alfworld":
            self._add_alfworld()
        elif dialect == "webarena":
            self._add_webarena()
        elif dialect == "babyai":
            self._add_babyai()
        else:
            self._add_indexed()

    def _fail(self) -> PlainTextResponse | dict[str, Any] | None:
        fault, self.fault = self.fault, ""
        if fault == "status":
            raise HTTPException(500)
        if fault == "error":
            return {"error": "The id 0 is not valid."}
        return PlainTextResponse("<html>") if fault else None

    def _add_alfworld(self) -> None:
        @self.app.post("/create")
        async def create():
            self.num_created += 1
            return {"id": self.num_created - 1}

        @self.app.post("/reset")
        async def reset(request: Request):
            body = await request.json()
            if body["id"] >= self.num_created:
                return {"error": f"The id {body['id']} is not valid."}
            if body["game"] == 13:
                return {"error": "no such file"}
            self.resets.append(body)
            offered = ["go to bed 1", "look"]
            room = f"You are in room {body['game']}.\nYour task is to: sleep."
            return {"id": body["id"], "observation": room, "available_actions": offered} | {
                "task_type": "bed/trial"
            }

        @self.app.get("/observation")
        async def observation(id: int):
            error = {"error": f"The id {id} is not valid."}
            return "You are in a room." if id < self.num_created else error

        @self.app.post("/step")
        async def step(request: Request):
            body = await request.json()
            self.steps.append(body)
            is_good = body["action"] == "good"
            text = "You sleep." if is_good else "Nothing happens."
            reply = {"observation": text, "reward": float(is_good), "done": is_good}
            return self._fail() or reply | {"available_actions": ["look"]}

    def _add_babyai(self) -> None:
        start = {"observation": "Your goal: go", "reward": 0, "score": 0, "done": False}

        @self.app.post("/create")
        async def create():
            return {"id": 0}

        @self.app.post("/reset")
        async def reset():
            return start

        @self.app.post("/step")
        async def step():
            # JSON of Python, which has infinity.
            reply = start | {"observation": self.observation, "score": self.score}
            return Response(json.dumps(reply), media_type="application/json")

        @self.app.post("/close")
        async def close():
            return True

    def _add_webarena(self) -> None:
        @self.app.post("/create")
        async def create():
            self.num_created += 1
            return {"env_idx": self.num_created - 1}

        @self.app.post("/reset")
        async def reset(request: Request):
            self.resets.append(await request.json())
            is_broken = self.resets[-1]["idx"] == 13
            if is_broken:
                return {"observation": "TimeoutError", "sites": "Error", "object": "Error"}
            return {"observation": "Tab 0 (current): Home", "sites": ["map"], "object": "find it"}

        @self.app.get("/observation")
        async def observation(env_idx: int):
            if self.is_gone:
                raise HTTPException(500)
            return "OBSERVATION:\nTab 0 (current): Home\nPREVIOUS ACTION: None"

        @self.app.post("/step")
        async def step(request: Request):
            body = await request.json()
            self.steps.append(body)
            is_stop = "stop" in body["action"]
            text = "OBSERVATION:\nTab 0 (current): Home\nPREVIOUS ACTION: that"
            if self.fault:
                self.is_gone = True
                text = "BrowserContext.new_page: Target closed"
            elif "``````" in body["action"]:
                text = "list index out of range"
            reply = {"observation": text, "reward": float("click" in body["action"] or is_stop)}
            return reply | {"terminated": is_stop, "truncated": False, "info": None}

        @self.app.post("/close")
        async def close(request: Request):
            self.num_closed += 1
            return {"closed": "closed"}

    def _add_indexed(self) -> None:
        is_tool = self.dialect in TOOLS
        questions: dict[int, str] = {}

        @self.app.post("/create")
        async def create(request: Request):
            body = await request.body()
            assert (await request.json() == {"id": 0}) if is_tool else body == b""
            self.num_created += 1
            questions[self.num_created - 1] = ""
            return self.num_created - 1

        @self.app.post("/reset")
        async def reset(request: Request):
            body = await request.json()
            item = body["id" if is_tool else "session_id"]
            questions[body["env_idx"]] = f"question {item}"
            self.resets.append(body)
            return f"question {item}" if is_tool else [f"question {item}", None]

        @self.app.get("/observation")
        async def observation(env_idx: int):
            return questions[env_idx]

        @self.app.post("/step")
        async def step(request: Request):
            body = await request.json()
            self.steps.append(body)
            is_good = "good" in body["action"]
            text = "Observation: fine\nGive me one action." if is_good else "ERROR | bad"
            key = "observation" if is_tool else "state"
            reply = {key: text, "reward": 1.0 if is_good else 0.25, "done": is_good}
            return self._fail() or (reply if is_tool else reply | {"info": None})


class Counted:
    """A server that counts its instances from 0 and tells each step's number and item.

    Attributes:
        has_close: it knows the route; servers of before 2025-09 do not.
        max_instances: a create beyond gives out the instances there are, one after the other.
        create_s: how long a create takes; one is made after the other.
    """

    def __init__(self, *, has_close: bool = True, max_instances: int = 1000) -> None:
        self.max_instances = max_instances
        self.create_s = 0.0
        self.fault = False
        self.num_asked = 0
        self.num_at_once = self.max_at_once = 0  # creates
        self.items: dict[int, int | None] = {}
        self._lock = asyncio.Lock()
        self.app = FastAPI()
        self._add_routes()
        if has_close:
            self.app.post("/close")(self._close)

    def start_anew(self) -> None:
        """Forget all instances, as a server does that is started again."""
        self.num_asked = 0
        self.items.clear()

    async def _close(self, request: Request):
        return self.items.pop((await request.json())["id"], None) is not None

    def _add_routes(self) -> None:
        @self.app.post("/create")
        async def create(request: Request):
            self.num_at_once += 1
            self.max_at_once = max(self.max_at_once, self.num_at_once)
            async with self._lock:
                await asyncio.sleep(self.create_s)
                self.num_at_once -= 1
                number = self.num_asked % self.max_instances
                self.num_asked += 1
                self.items.setdefault(number, None)
            return {"id": number} if await request.body() else number

        @self.app.post("/reset")
        async def reset(request: Request):
            body = await request.json()
            is_sql = "env_idx" in body
            number, item = (body["env_idx" if is_sql else "id"], body.get("data_idx"))
            self.items[number] = item
            return [f"item {item}", None] if is_sql else {"observation": f"item {item}"}

        @self.app.get("/observation")
        async def observation(env_idx: int):
            return f"question of {env_idx}"

        @self.app.post("/step")
        async def step(request: Request):
            if self.fault:
                raise HTTPException(500)
            body = await request.json()
            number = body.get("id", body.get("env_idx"))
            told = f"{number} plays {self.items[number]}"
            return {"observation": told, "state": told, "reward": 0, "done": False}
