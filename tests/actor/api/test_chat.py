"""Laws of a policy behind chat completions: what it is asked, by whom, and where it is found."""

import asyncio
import io
import json
import os
import socket
import stat
import subprocess
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from transformers import AutoTokenizer

from actor.api.chat import Chat, bound, listening, serve_engine
from actor.api.chat_endpoints import ChatEndpoint, endpoint_path, find_endpoint
from actor.formats.renderer import Renderer
from actor.policy import PolicySection
from actor.rollout.episode import ContextFull, OnTokens, PolicyFailed, Turn
from actor.seats.endpoint import Endpoint
from common.config.load import load_config
from common.errors import ConfigError, EngineError
from common.http import serving as limits
from common.repository import ROOT
from common.store.run_dir import RunDir

if TYPE_CHECKING:  # The import takes a second.
    from openai import AsyncOpenAI

CFG = load_config("quickstart", [])
TOKENIZER: Any = AutoTokenizer.from_pretrained(
    ROOT / "configs" / "policies" / "tiny", local_files_only=True
)


class Parrot:
    """An engine that always gives one answer and records its prompts."""

    version = 7

    def __init__(self, says: str = "turn left", *, waits_at: int = -1) -> None:
        """`waits_at`: the number of tokens after which a request waits until it is aborted."""
        self.waits_at = waits_at
        self.num_sampled = 0
        self.num_aborted = 0
        self.asked: list[list[int]] = []
        self.temperatures: list[float | None] = []
        self.seeds: list[int | None] = []
        self.limits: list[int] = []
        self.ids = TOKENIZER.encode(says, add_special_tokens=False)
        self.problem = ""

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None,
        temperature: float | None,
        max_tokens: int,
        on_tokens: OnTokens | None = None,
        **_: Any,
    ) -> Turn:
        self.limits.append(max_tokens)
        self.seeds.append(seed)
        self.asked.append(prompt_ids)
        self.temperatures.append(temperature)
        if self.problem:
            raise EngineError(self.problem)
        for number, token in enumerate(self.ids):
            if number == self.waits_at:
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    self.num_aborted += 1
                    raise
            self.num_sampled += 1
            if on_tokens is not None and number + 1 < len(self.ids):
                on_tokens(Turn([token], [0.0], [self.version]))
                await asyncio.sleep(0)
        return Turn(self.ids, [0.0] * len(self.ids), [self.version] * len(self.ids))


def chat(parrot: Parrot, key: str = "k") -> Chat:
    return Chat(
        engine=cast(Any, parrot),
        renderer=Renderer(TOKENIZER),
        actor=CFG.actor,
        key=key,
        name=lambda version: f"a, version {version}",
        numbers=count(),
    )


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(texts)]


async def ask(url: str, key: str, *texts: str) -> Any:
    cfg = PolicySection(url=url, model="m", max_tries=1, timeout_s=10)
    async with Endpoint(cfg, key=key) as endpoint:
        return await endpoint.complete(said(*texts))


def test_served_conversation_matches_episode_and_requires_key() -> None:
    parrot = Parrot()

    async def work() -> None:
        async with listening(chat(parrot)) as url:
            reply = await ask(url, "k", "goal: go", "look<|im_end|>", "a wall")
            assert (reply.text, reply.model) == ("turn left", "a, version 7")
            with pytest.raises(ConfigError, match="wrong API key"):
                await ask(url, "other", "goal: go")
            with pytest.raises(
                PolicyFailed, match="must end with a message that is not of the assistant"
            ):
                await ask(url, "k", "goal: go", "look")
            with pytest.raises(ContextFull):
                await ask(url, "k", "far " * 20_000)
            parrot.problem = "engine died: killed by SIGKILL"
            with pytest.raises(PolicyFailed, match="engine died"):
                await ask(url, "k", "goal: go")

    asyncio.run(work())
    renderer = Renderer(TOKENIZER)
    end = renderer.end_of_turn_ids[0]
    first = renderer.first_prompt("goal: go")
    last = renderer.after_action("a wall", is_stopped=True)
    (whole, _) = parrot.asked
    assert whole[: len(first)] == first
    assert whole[-len(last) :] == last
    answer = whole[len(first) : -len(last)]
    assert answer[-1] == end
    assert end not in answer[:-1]  # Typed text contains no end of turn.
    assert renderer.action_text(answer) == "look<|im_end|>"


def test_request_temperature_is_used_or_refused() -> None:
    parrot = Parrot()

    async def work() -> list[int]:
        found: list[int] = []
        async with listening(chat(parrot, key="")) as url, aiohttp.ClientSession() as http:
            for told in ({}, {"temperature": 0}, {"temperature": 1.5}, {"temperature": "hot"}):
                body = {"messages": said("goal: go"), **told}
                async with http.post(f"{url}/chat/completions", json=body) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(work()) == [200, 200, 200, 400]
    assert parrot.temperatures == [None, 0.0, 1.5]


def test_chat_request_seed_reaches_the_engine() -> None:
    parrot = Parrot()

    async def work() -> list[int]:
        found: list[int] = []
        async with listening(chat(parrot, key="")) as url, aiohttp.ClientSession() as http:
            for told in ({}, {"seed": 7}, {"seed": -1}, {"seed": 2**63}, {"seed": True}):
                body = {"messages": said("goal: go"), **told}
                async with http.post(f"{url}/chat/completions", json=body) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(work()) == [200, 200, 200, 400, 400]
    assert parrot.seeds == [None, 7, 2**63 - 1]


def served_to_client(parrot: Parrot, work: "Callable[[AsyncOpenAI], Awaitable[Any]]") -> Any:
    """Return what a client of OpenAI's own package finds at a served policy."""
    from openai import AsyncOpenAI

    async def run() -> Any:
        async with (
            listening(chat(parrot)) as url,
            AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client,
        ):
            return await work(client)

    return asyncio.run(run())


def shown(texts: list[str]) -> list[int]:
    return Renderer(TOKENIZER).conversation(texts)


def test_content_parts_and_null_are_texts() -> None:
    parrot = Parrot()
    parts: Any = [{"type": "text", "text": "goal: "}, {"type": "text", "text": "go"}]
    messages: Any = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "a wall"},
    ]

    async def work(client: "AsyncOpenAI") -> None:
        await client.chat.completions.create(model="m", messages=messages)

    served_to_client(parrot, work)
    assert parrot.asked == [shown(["goal: go", "", "a wall"])]


def test_limit_stop_and_number_of_answers_are_obeyed() -> None:
    async def work(client: "AsyncOpenAI") -> Any:
        create: Any = client.chat.completions.create
        messages: Any = said("goal: go")
        return [
            await create(model="m", messages=messages, **how)
            for how in ({"max_tokens": 1}, {"stop": ["left"]}, {"n": 3, "seed": 4})
        ]

    parrot = Parrot()
    short, stopped, three = served_to_client(parrot, work)
    assert parrot.limits == [1, CFG.actor.max_turn_tokens, *[CFG.actor.max_turn_tokens] * 3]
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 1)
    assert stopped.choices[0].message.content == "turn"
    assert stopped.choices[0].finish_reason == "stop"
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert set(parrot.seeds[2:]) == {4, 5, 6}
    num = len(parrot.ids)
    prompt = len(shown(["goal: go"]))
    assert (three.usage.completion_tokens, three.usage.total_tokens) == (3 * num, prompt + 3 * num)
    assert three.created > 0


def test_stream_adds_up_to_the_answers() -> None:
    async def work(client: "AsyncOpenAI") -> list[Any]:
        messages: Any = said("goal: go")
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="m", messages=messages, n=2, stream=True, stream_options=options
        )
        return [each async for each in stream]

    chunks = served_to_client(Parrot(), work)
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["turn left"] * 2
    assert chunks[-1].usage.completion_tokens == 2 * len(Parrot().ids)


def test_stop_text_ends_the_sampling() -> None:
    async def work(client: "AsyncOpenAI") -> list[str]:
        create: Any = client.chat.completions.create
        whole = await create(model="m", messages=said("goal: go"), stop=["left"])
        stream = await create(model="m", messages=said("goal: go"), stop=["left"], stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [whole.choices[0].message.content, "".join(parts)]

    parrot = Parrot("turn left and go on to the red ball")
    assert served_to_client(parrot, work) == ["turn"] * 2
    assert parrot.num_sampled < len(parrot.ids)


def test_text_is_sent_as_it_is_sampled_and_a_client_that_leaves_aborts() -> None:
    async def work(client: "AsyncOpenAI") -> str:
        text = ""
        create: Any = client.chat.completions.create
        async with asyncio.timeout(20):
            stream = await create(model="m", messages=said("goal: go"), stream=True)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text:
                    break
            await stream.close()
            while not parrot.num_aborted:
                await asyncio.sleep(0.01)
        return text

    parrot = Parrot("turn left and go on to the red ball", waits_at=4)
    assert served_to_client(parrot, work).startswith("turn")


def test_failure_before_the_first_token_of_a_stream_is_a_status() -> None:
    async def work(client: "AsyncOpenAI") -> int:
        import openai

        create: Any = client.chat.completions.create
        with pytest.raises(openai.InternalServerError, match="engine died") as caught:
            await create(model="m", messages=said("goal: go"), stream=True)
        return caught.value.status_code

    parrot = Parrot()
    parrot.problem = "engine died: killed by SIGKILL"
    assert served_to_client(parrot, work) == 500


def test_served_policy_is_listed_as_a_model() -> None:
    async def work(client: "AsyncOpenAI") -> list[str]:
        listed = [each.id async for each in client.models.list()]
        return [*listed, (await client.models.retrieve(listed[0])).id]

    assert served_to_client(Parrot(), work) == ["a, version 7"] * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("presence_penalty", 1.0),
        ("top_logprobs", 2),
        ("logit_bias", {"1": 2}),
        ("response_format", {"type": "json_object"}),
        ("n", 0),
        ("n", "two"),
        ("max_tokens", 0),
        ("stop", 3),
        ("stream", "yes"),
        ("unheard_of", 1),
        ("stream_options", {"unheard_of": 1}),
        ("stream_options", 1),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),  # the template has none
    ],
)
def test_field_that_is_not_obeyed_is_a_400(field: str, value: object) -> None:
    parrot = Parrot()

    async def work(client: "AsyncOpenAI") -> str:
        from openai import BadRequestError

        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(
                model="m", messages=cast(Any, said("go")), extra_body={field: value}
            )
        return str(caught.value.param)

    assert served_to_client(parrot, work) == field
    assert parrot.asked == []


def test_errors_of_http_have_the_form_of_the_api() -> None:
    async def work() -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        async with listening(chat(Parrot(), key="")) as url, aiohttp.ClientSession() as http:
            for method, path, body in (
                ("POST", "/embeddings", b"{}"),
                ("GET", "/chat/completions", None),
                ("POST", "/chat/completions", io.BytesIO(b"x" * 2**21)),
                ("GET", "/models/other", None),
            ):
                async with http.request(method, url + path, data=body) as answer:
                    error = (await answer.json())["error"]
                    assert f"{path.rpartition('/')[2]}" in error["message"]
                    found.append((answer.status, error["code"]))
        return found

    assert asyncio.run(work()) == [
        *((404, "not_found"), (405, "method_not_allowed")),
        *((413, "request_entity_too_large"), (404, "model_not_found")),
    ]


def test_policy_port_is_bound_or_conflict_named() -> None:
    async def work(place: socket.socket) -> str:
        async with listening(chat(Parrot()), place) as url:
            return (await ask(url, "k", "goal: go")).text

    with bound(0) as place:
        port = place.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"policy\.port={port}: Address already in use"):
            bound(port)
        assert asyncio.run(work(place)) == "turn left"


def test_keyless_endpoint_refuses_cross_origin_requests() -> None:
    async def work() -> list[int]:
        body = json.dumps({"messages": said("goal: go")})
        plain = {"Content-Type": "text/plain"}
        found: list[int] = []
        async with listening(chat(Parrot(), key="")) as url, aiohttp.ClientSession() as http:
            for headers in (plain, {**plain, "Origin": "http://evil"}, {"Host": "evil.example"}):
                path = f"{url}/chat/completions"
                async with http.post(path, data=body, headers=headers) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(work()) == [200, 403, 403]


def test_running_actor_serves_chat_and_cleans_up(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.keys.mkdir()
    for name, host in (("actor-0", "elsewhere"), ("actor-1", socket.gethostname())):
        away = ChatEndpoint(
            url="http://127.0.0.1:9/v1", key="x", host=host
        )  # No server listens there.
        endpoint_path(tmp_path, name).write_text(away.as_text(), encoding="utf-8")
    endpoint_path(tmp_path, "actor-2").write_text("half a li", encoding="utf-8")
    with subprocess.Popen(["true"]) as gone:
        pass
    for name, pid in (("killed", gone.pid), ("alive", os.getpid())):
        left = ChatEndpoint(
            url="http://127.0.0.1:9/v1", key="x", host=socket.gethostname(), pid=pid
        )
        endpoint_path(tmp_path, name).write_text(left.as_text(), encoding="utf-8")

    async def work() -> None:
        engine = cast(Any, Parrot())
        assert await find_endpoint(tmp_path) is None
        async with serve_engine(CFG, run_dir, "actor-3", engine, Renderer(TOKENIZER)):
            found = await find_endpoint(tmp_path)
            assert found is not None
            path = endpoint_path(tmp_path, "actor-3")
            kept = {each.name for each in run_dir.keys.iterdir()}
            assert "chat-killed" not in kept
            assert {"chat-alive", "chat-actor-0", "chat-actor-1", "chat-actor-2"} <= kept
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            reply = await ask(found.url, found.key, "goal: go")
            assert (reply.text, reply.model) == ("turn left", f"{CFG.run.name}, version 7")
        assert not path.exists()
        sync = load_config("quickstart", ["train.mode=sync"])
        async with serve_engine(sync, run_dir, "actor-4", engine, Renderer(TOKENIZER)):
            assert await find_endpoint(tmp_path) is None  # it would change what the run samples

    asyncio.run(work())


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nx: "])
def test_chat_endpoint_closes_silent_connections(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.2)

    async def received() -> bytes:
        place = bound(0)
        async with listening(chat(Parrot()), place), asyncio.timeout(10.0):
            reader, writer = await asyncio.open_connection(*place.getsockname()[:2])
            writer.write(sent)
            content = await reader.read()
            writer.close()
            return content

    assert not asyncio.run(received())
