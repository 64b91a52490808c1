"""Small servers in the shapes of AgentGym's dialects, for driving them without AgentGym."""

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse

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
        self.app = FastAPI()
        if dialect == "alfworld":
            self._add_alfworld()
        elif dialect == "webarena":
            self._add_webarena()
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
            self.resets.append(body)
            offered = ["go to bed 1", "look"]
            room = f"You are in room {body['game']}.\nYour task is to: sleep."
            return {"id": body["id"], "observation": room, "available_actions": offered} | {
                "task_type": "bed/trial"
            }

        @self.app.post("/step")
        async def step(request: Request):
            body = await request.json()
            self.steps.append(body)
            is_good = body["action"] == "good"
            text = "You sleep." if is_good else "Nothing happens."
            reply = {"observation": text, "reward": float(is_good), "done": is_good}
            return self._fail() or reply | {"available_actions": ["look"]}

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
            return "OBSERVATION:\nTab 0 (current): Home\nPREVIOUS ACTION: None"

        @self.app.post("/step")
        async def step(request: Request):
            body = await request.json()
            self.steps.append(body)
            is_stop = "stop" in body["action"]
            text = "OBSERVATION:\nTab 0 (current): Home\nPREVIOUS ACTION: that"
            if self.fault:
                text = "BrowserContext.new_page: Target closed"
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
