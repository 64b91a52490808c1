"""A teacher behind the routes of `python run.py serve`, with given numbers in place of vLLM."""

import asyncio
import threading
from itertools import count
from typing import Any, cast

from transformers import AutoTokenizer

from actor.api.chat import Chat, bound, listening
from actor.formats.renderer import Renderer
from common.config.load import load_config
from common.errors import EngineError
from common.repository import ROOT
from tests.ports import free_port

CFG = load_config("quickstart", [])
TOKENIZER: Any = AutoTokenizer.from_pretrained(
    ROOT / "configs" / "policies" / "tiny", local_files_only=True
)
KEY = "secret-of-the-teacher"
OWN_RANK = 99


class GivenScores:
    """An engine that gives token t the logprob -t / 8, and knows tokens 0, 1, 2 ... as the best."""

    version = 0
    vocab_size = 448

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.num_at_once = 0
        self.most_at_once = 0
        self.problem = ""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def prompt_logprobs(
        self, token_ids: list[int], *, num_top: int, request_id: str
    ) -> list[dict[int, tuple[float, int]] | None]:
        if self.problem:
            raise EngineError(self.problem)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await self.may_answer.wait()
        await asyncio.sleep(0)
        self.num_at_once -= 1
        self.asked.append(token_ids)
        best = {token: (-(token + 1.0), token + 1) for token in range(num_top)}
        return [None, *({each: (-each / 8, OWN_RANK)} | best for each in token_ids[1:])]


class Teacher:
    """The server in a thread of its own; it can end and listen again at the same port."""

    def __init__(self, engine: GivenScores | None = None) -> None:
        self.engine = engine or GivenScores()
        self.port = free_port()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.listen()

    def listen(self) -> None:
        place = bound(self.port)
        chat = Chat(
            engine=cast(Any, self.engine),
            renderer=Renderer(TOKENIZER),
            actor=CFG.actor,
            key=KEY,
            name=lambda version: "teacher",
            numbers=count(),
        )
        self._context = listening(chat, place)
        self.url = self.call(self._context.__aenter__())

    def end(self) -> None:
        self.call(self._context.__aexit__(None, None, None))

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def set_answering(self, is_answering: bool) -> None:
        event = self.engine.may_answer
        self._loop.call_soon_threadsafe(event.set if is_answering else event.clear)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()
