"""Laws of a policy behind an OpenAI-compatible endpoint, against a real small server."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actor.policy import PolicySection
from actor.rollout.episode import ContextFull, PolicyFailed
from actor.seats.endpoint import Endpoint, Reply, TextEpisode
from common.errors import ConfigError
from tests.actor.toy_servers import ToyEndpoint, serve
from tests.ports import free_port

HELLO = [{"role": "user", "content": "hello"}]


def section(url: str, **fields: Any) -> PolicySection:
    few = {"backoff_s": 0.01, "max_backoff_s": 0.05, "timeout_s": 5.0, "max_tries": 3}
    return PolicySection(url=f"{url}/v1", model="toy-1", **{**few, **fields})


def ask(toy: ToyEndpoint, **fields: Any) -> Reply:
    async def run(url: str) -> Reply:
        async with Endpoint(section(url, **fields)) as endpoint:
            return await endpoint.complete(HELLO)

    with serve(toy.app()) as url:
        return asyncio.run(run(url))


def test_endpoint_receives_configured_model_temperature_and_limit() -> None:
    toy = ToyEndpoint()
    reply = ask(toy, temperature=0.5, max_turn_tokens=9, limit_key="max_completion_tokens")
    assert reply == Reply(text="go", is_stopped=True)
    assert toy.requests == [
        {"model": "toy-1", "messages": HELLO, "temperature": 0.5, "max_completion_tokens": 9}
    ]
    assert toy.keys == [None]


def test_endpoint_of_this_machine_bypasses_a_closed_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    assert ask(ToyEndpoint()).text == "go"


def test_api_key_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOY_KEY", "sk-secret")
    caplog.set_level(logging.DEBUG)
    toy = ToyEndpoint(script=[500, 500, 500], texts={500: "your key sk-secret is fine"})
    with pytest.raises(PolicyFailed) as failed:
        ask(toy, api_key_env="TOY_KEY")
    assert toy.keys == ["Bearer sk-secret"] * 3
    assert "your key *** is fine" in str(failed.value)
    assert "sk-secret" not in caplog.text + str(failed.value) + repr(failed.value.__cause__)


def test_missing_key_is_refused_before_any_request() -> None:
    with pytest.raises(ConfigError, match="api_key_env=NO_SUCH_KEY: this variable is not set"):
        ask(ToyEndpoint(), api_key_env="NO_SUCH_KEY")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_passing_failure_is_tried_again(status: int) -> None:
    toy = ToyEndpoint(script=[status, status])
    assert ask(toy).text == "go"
    assert len(toy.requests) == 3


def test_tries_are_bounded() -> None:
    toy = ToyEndpoint(script=[429] * 9)
    with pytest.raises(PolicyFailed, match="HTTP 429 no, after 3 tries"):
        ask(toy)
    assert len(toy.requests) == 3


def test_retry_after_is_limited_to_the_bound() -> None:
    toy = ToyEndpoint(script=[429], retry_after="3600")
    assert ask(toy).text == "go"  # within the test's time


def test_silence_is_a_failure_of_the_policy() -> None:
    with pytest.raises(PolicyFailed, match="TimeoutError"):
        ask(ToyEndpoint(delay_s=0.4), timeout_s=0.05, max_tries=2)


def test_unreachable_endpoint_fails_the_policy() -> None:
    async def run() -> None:
        async with Endpoint(section("http://127.0.0.1:9")) as endpoint:
            await endpoint.complete(HELLO)

    with pytest.raises(PolicyFailed, match="3 tries"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "key"),
    [(401, "policy.api_key_env="), (403, "policy.api_key_env="), (404, "policy.model=toy-1")],
)
def test_refused_request_names_its_key_without_retry(status: int, key: str) -> None:
    toy = ToyEndpoint(script=[status])
    with pytest.raises(ConfigError, match=key):
        ask(toy)
    assert len(toy.requests) == 1


def test_context_overflow_differs_from_a_bad_request() -> None:
    full = "This model's maximum context length is 8 tokens"
    with pytest.raises(ContextFull):
        ask(ToyEndpoint(script=[400], texts={400: full}))
    with pytest.raises(PolicyFailed, match="HTTP 400 bad temperature"):
        ask(ToyEndpoint(script=[400], texts={400: "bad temperature"}))


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"message": {"content": ["x"]}}]}, {"choices": 3}]
)
def test_malformed_completion_is_a_policy_failure(body: dict[str, Any]) -> None:
    with pytest.raises(PolicyFailed, match="not a chat completion"):
        ask(ToyEndpoint(script=[body]))


def test_truncated_or_empty_answer_is_accepted() -> None:
    body = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    assert ask(ToyEndpoint(script=[body])) == Reply(text="", is_stopped=False)


def test_conversation_grows_by_turns_as_bytes() -> None:
    toy = ToyEndpoint(script=["tür"])

    async def run(url: str) -> None:
        async with Endpoint(section(url)) as endpoint:
            episode = TextEpisode(endpoint)
            assert episode.first_prompt("öffne") == list("öffne".encode())
            turn = await episode.act([], None)  # type: ignore[arg-type]
            assert episode.action_text(turn.token_ids) == "tür"
            assert len(turn.logprobs) == len(turn.versions) == len(turn.token_ids) == 4
            episode.after_action("zu", is_stopped=True)
            await episode.act([], None)  # type: ignore[arg-type]
            assert (endpoint.num_prompt_tokens, endpoint.num_sampled_tokens) == (14, 4)

    with serve(toy.app()) as url:
        asyncio.run(run(url))
    assert toy.requests[1]["messages"] == [
        {"role": "user", "content": "öffne"},
        {"role": "assistant", "content": "tür"},
        {"role": "user", "content": "zu"},
    ]


@contextlib.contextmanager
def _served_by_vllm(model: Path, log: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "toy-1", "--dtype", "float32"]
    command += ["--max-model-len", "128", "--enforce-eager", "--port", str(port)]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            _wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def _wait_until_up(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(encoding="utf-8")[-2_000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
            return
        threading.Event().wait(0.5)
    raise AssertionError(f"vLLM is not up: {log.read_text(encoding='utf-8')[-2_000:]}")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllms_own_server_is_understood(repository: Path, tmp_path: Path) -> None:
    model = repository / "configs" / "policies" / "tiny"

    async def run(url: str) -> None:
        cfg = section(url, max_turn_tokens=4, timeout_s=60.0)
        async with Endpoint(cfg) as endpoint:
            reply = await endpoint.complete(HELLO)
            assert reply.text
            assert 1 <= endpoint.num_sampled_tokens <= 4
            with pytest.raises(ContextFull):
                await endpoint.complete([{"role": "user", "content": "ball " * 400}])
        async with Endpoint(dataclasses.replace(cfg, model="other")) as endpoint:
            with pytest.raises(ConfigError, match=r"policy\.model=other"):
                await endpoint.complete(HELLO)

    with _served_by_vllm(model, tmp_path / "vllm.log") as url:
        asyncio.run(run(url))
