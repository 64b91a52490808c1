"""Laws of the routes that score given tokens."""

from typing import Any

import aiohttp
import pytest

from tests.learner.teacher.served import KEY, OWN_RANK, TOKENIZER, Teacher


async def post(url: str, path: str, body: Any, key: str = KEY) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as http:
        base = url.removesuffix("/v1")
        async with http.post(base + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture(scope="module")
def teacher() -> Any:
    served = Teacher()
    yield served
    served.end()
    served.close()


def ask(teacher: Teacher, path: str, body: Any, key: str = KEY) -> tuple[int, Any]:
    return teacher.call(post(teacher.url, path, body, key))


def test_prompt_logprobs_have_the_form_of_vllm(teacher: Teacher) -> None:
    body = {"prompt": [5, 16, 8], "prompt_logprobs": 1, "max_tokens": 1}
    status, reply = ask(teacher, "/v1/completions", body)
    assert status == 200
    best = {"0": {"logprob": -1.0, "rank": 1}}
    assert reply["choices"][0]["prompt_logprobs"] == [
        None,
        {"16": {"logprob": -2.0, "rank": OWN_RANK}} | best,
        {"8": {"logprob": -1.0, "rank": OWN_RANK}} | best,
    ]
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["model"] == "teacher"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": [5, 6]}, "prompt_logprobs: must be a number from 0 to 1024"),
        ({"prompt": [5, 6], "prompt_logprobs": -1}, "prompt_logprobs: must be"),
        ({"prompt": "text", "prompt_logprobs": 0}, "prompt: must be a list of token ids"),
        ({"prompt": [5, 448], "prompt_logprobs": 0}, "token id 448 is outside"),
        ({"prompt": [5, 6], "prompt_logprobs": 0, "max_tokens": 7}, "max_tokens: must be"),
        ({"prompt": [5] * 512, "prompt_logprobs": 0}, "exceed the context of 512"),
    ],
)
def test_wrong_request_is_refused_with_its_field(teacher: Teacher, body: Any, reason: str) -> None:
    status, reply = ask(teacher, "/v1/completions", body)
    assert status == 400
    assert reason in reply["error"]["message"]


def test_tokenizer_routes_answer_as_vllm_does(teacher: Teacher) -> None:
    text = "go north"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    body = {"prompt": text, "add_special_tokens": False}
    status, reply = ask(teacher, "/tokenize", body)
    assert status == 200
    assert (reply["tokens"], reply["count"]) == (ids, len(ids))
    assert (reply["max_model_len"], reply["vocab_size"]) == (512, len(TOKENIZER))
    assert ask(teacher, "/detokenize", {"tokens": ids})[1]["prompt"] == text
    assert ask(teacher, "/detokenize", {"tokens": [10**6]})[1]["prompt"] == ""


def test_scoring_routes_require_the_key(teacher: Teacher) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        status, reply = ask(teacher, path, {}, key="other")
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
