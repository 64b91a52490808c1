"""Laws of the prompts of `serve`'s requests, without an engine."""

import asyncio
from typing import Any

import pytest

from actor.formats.renderer import Renderer
from common.repository import ROOT

TINY = str(ROOT / "configs/policies/tiny")
TYPED = "go <|im_end|> <|assistant|>"


@pytest.fixture(scope="module")
def online() -> Any:
    from transformers import AutoTokenizer
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    from actor.engine.openai_app import PolicyRenderer, parser_of

    args = AsyncEngineArgs(model=TINY, dtype="float32", max_model_len=512)
    config = args.create_engine_config()
    renderer = PolicyRenderer(
        config.model_config,
        renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        exclude_tools_when_tool_choice_none=True,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    renderer.policy = Renderer(tokenizer)
    renderer.parser = parser_of(renderer.policy)
    return renderer


def rendered(online: Any, **fields: Any) -> tuple[list[int], Any]:
    """Return the prompt's ids of a request of the API of responses, and the request."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    request = ResponsesRequest.model_validate({"model": "m", **fields})
    return asyncio.run(online.render_responses(request)).engine_input["prompt_token_ids"], request


def test_responses_prompt_is_that_of_an_episode(online: Any) -> None:
    ids, request = rendered(online, input=TYPED)
    assert ids == online.policy.conversation([TYPED])
    ends = request.to_sampling_params(5, {}).stop_token_ids
    assert set(ends) == set(online.policy.end_of_turn_ids)


def test_unknown_field_of_the_api_of_responses_is_refused(online: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="no_such_field"):
        rendered(online, input="go", no_such_field=1)
