"""vLLM's own server of OpenAI's and Anthropic's APIs, over an engine of this process.

The requests, the sampling and the streams are vLLM's. The prompts of conversations are encoded as
those of episodes, and calls of tools are read in the form of the policy's chat template.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.anthropic import api_router as anthropic_api
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion import api_router as chat_api
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_api
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models import api_router as models_api
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses import api_router as responses_api
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize import api_router as tokenize_api
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from actor.agents.responses_api import HARMLESS as RESPONSES_HARMLESS
from actor.agents.responses_api import IGNORED as RESPONSES_IGNORED
from actor.agents.responses_api import RESPONSES_API
from actor.api.chat_api import CHAT, CHAT_API, CHAT_IGNORED
from actor.api.prompts import encode_messages, matched
from actor.api.requests import Api, ApiError, arguments_text, check_fields, with_system
from actor.engine.engine import Engine
from actor.formats.renderer import Renderer
from common.formats.calls import CallForm

logger = logging.getLogger(__name__)

# Characters of a possible start of a call that a stream holds back before it sends them as text.
HELD_CHARS = 64
ENFORCER = "lmformatenforcer"
# Request fields of a conversation that only the chat template itself can show.
OF_TEMPLATE = ("chat_template", "chat_template_kwargs", "documents", "continue_final_message")


class AdapterClient:
    """vLLM's engine whose requests all use one adapter."""

    def __init__(self, llm: AsyncLLM, adapter: LoRARequest | None) -> None:
        self._llm = llm
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, lora_request: LoRARequest | None = None, **options: Any) -> Any:
        """Sample an answer with the adapter."""
        return self._llm.generate(*args, lora_request=self._adapter or lora_request, **options)


class ServedModel(OpenAIServingModels):
    """The only model, which answers requests with any name."""

    def is_base_model(self, model_name: str) -> bool:
        return True


def check_unknown(
    request: ChatCompletionRequest | CompletionRequest | ResponsesRequest,
    harmless: dict[str, tuple[Any, ...]] = CHAT,
    ignored: dict[str, str] = CHAT_IGNORED,
) -> None:
    """Check the fields that vLLM does not know, by the rules of agents' requests.

    Args:
        harmless, ignored: as in `check_fields`.

    Raises: VLLMValidationError: a field would change the answer, or no API has it.
    """
    try:
        check_fields(dict(request.model_extra or {}), set(), harmless, ignored)
    except ApiError as error:
        raise VLLMValidationError(error.message, parameter=error.param) from error


class PolicyRenderer(OnlineRenderer):
    """Encodes conversations as episodes are encoded: typed text has no control tokens."""

    policy: Renderer

    async def render_chat(
        self, request: ChatCompletionRequest, *, skip_mm_cache: bool = False
    ) -> Any:
        """Return vLLM's conversation and prompts, with the policy's own token ids."""
        check_unknown(request)
        self._prepare(request)
        rendered: Any = await super().render_chat(request, skip_mm_cache=skip_mm_cache)
        if not isinstance(rendered, ErrorResponse) and self._is_plain(request):
            prompt: dict[str, Any] = rendered[1][0]
            prompt["prompt_token_ids"] = self._encode(request)
            prompt.pop("prompt", None)
        return rendered

    async def render_responses(
        self,
        request: ResponsesRequest,
        *,
        previous_messages: Any = None,
        previous_response_outputs: Any = None,
        **options: Any,
    ) -> Any:
        """Return vLLM's messages and prompt of OpenAI's API of responses, with our token ids."""
        check_unknown(request, RESPONSES_HARMLESS, RESPONSES_IGNORED)
        self._prepare(request)
        rendered: Any = await super().render_responses(
            request,
            previous_messages=previous_messages,
            previous_response_outputs=previous_response_outputs,
            **options,
        )
        own = request.chat_template_kwargs or request.previous_input_messages
        has_more = previous_messages or previous_response_outputs or own
        if isinstance(rendered, ErrorResponse) or self.use_harmony or has_more:
            return rendered
        if rendered.messages[-1]["role"] == "assistant":  # A prefilled answer.
            return rendered
        body = request.model_dump(include={"input", "instructions", "tools"}, exclude_none=True)
        if request.tool_choice == "none":
            body["tool_choice"] = "none"
        rendered.engine_input["prompt_token_ids"] = self._tokens(RESPONSES_API, body)
        rendered.engine_input.pop("prompt", None)
        return rendered

    def _prepare(self, request: ChatCompletionRequest | ResponsesRequest) -> None:
        """End an answer as an episode's turn ends. Raises: VLLMValidationError: no tools here."""
        why = self.policy.calls
        if request.tools and request.tool_choice != "none" and isinstance(why, str):
            raise VLLMValidationError(f"tools: {why}", parameter="tools")
        if not request.ignore_eos:
            ends = [*(request.stop_token_ids or []), *self.policy.end_of_turn_ids]
            request.stop_token_ids = list(dict.fromkeys(ends))

    async def render_completion(self, request: CompletionRequest, **options: Any) -> Any:
        """Return vLLM's prompts of a completion."""
        check_unknown(request)
        return await super().render_completion(request, **options)

    def _is_plain(self, request: ChatCompletionRequest) -> bool:
        """Return whether the policy's own renderer can encode a conversation."""
        has_more = any(getattr(request, name, None) for name in OF_TEMPLATE)
        last: Any = request.messages[-1] if request.messages else {}
        is_prefilled = last.get("role") == "assistant"
        is_other = self.use_harmony or not request.add_generation_prompt
        return not (has_more or is_prefilled or is_other)

    def _encode(self, request: ChatCompletionRequest) -> list[int]:
        """Return the token ids of a conversation. Raises: VLLMValidationError."""
        body = request.model_dump(include={"messages", "tools"}, exclude_none=True)
        if request.tool_choice == "none":
            body["tool_choice"] = "none"
        return self._tokens(CHAT_API, body)

    def _tokens(self, api: Api, body: dict[str, Any]) -> list[int]:
        """Return the token ids of the prompt of a request. Raises: VLLMValidationError."""
        try:
            asked = matched(with_system(api.read(body), []))
            return encode_messages(self.policy, asked.messages, tools=asked.tools)
        except ApiError as error:
            raise VLLMValidationError(error.message, parameter=error.param) from error


class PolicyToolParser(ToolParser):
    """Reads calls in the form of the policy's chat template.

    A stream sends text up to a possible call at once, and each call once it is complete.
    """

    form: ClassVar[CallForm]
    special: ClassVar[list[str]]

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._text = ""
        self._num_sent = 0  # Characters of the text that were sent.
        self._num_calls = 0
        self._shown = [each.model_dump() for each in self.tools]

    def adjust_request(self, request: Any) -> Any:
        """Keep special tokens in the text, because some forms of calls have them."""
        if request.tools and getattr(request, "tool_choice", None) != "none":
            request.skip_special_tokens = False
        return super().adjust_request(request)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Return the text and the calls of a whole answer."""
        text, calls = self.form.read(model_output, self._shown)
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                ToolCall(function=FunctionCall(name=name, arguments=arguments_text(arguments)))
                for name, arguments in calls
            ],
            content=(self._bare(text) if calls else self._bare(model_output)) or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Return the new part of an answer that can be sent; None: there is none."""
        self._text = current_text
        return self._sent(is_over=False)

    def flush(self) -> DeltaMessage | None:
        """Return the part of an answer that was held back until its end."""
        return self._sent(is_over=True)

    def _sent(self, *, is_over: bool) -> DeltaMessage | None:
        _, calls = self.form.read(self._text, self._shown)
        new = [
            DeltaToolCall(
                id=make_tool_call_id(),
                type="function",
                index=index,
                function=DeltaFunctionCall(name=name, arguments=arguments_text(arguments)),
            )
            for index, (name, arguments) in enumerate(calls)
            if index >= self._num_calls
        ]
        self._num_calls += len(new)
        end = self._text_end(is_over=is_over)
        content = self._bare(self._text[self._num_sent : end])
        self._num_sent = max(self._num_sent, end)
        if not (content or new):
            return None
        return DeltaMessage(content=content or None, tool_calls=new)

    def _text_end(self, *, is_over: bool) -> int:
        """Return the end of the text that is no call, and not the start of one."""
        if is_over and not self._num_calls:
            return len(self._text)
        begin = self.form.begin.search(self._text)
        if begin is not None:
            return max(begin.start(), self._num_sent)
        marks = [self._text.find(mark, self._num_sent) for mark in "<[{"]
        first = min((at for at in marks if at >= 0), default=len(self._text))
        return first if len(self._text) - first <= HELD_CHARS else len(self._text)

    def _bare(self, text: str) -> str:
        """Return a text without special tokens."""
        for token in self.special:
            text = text.replace(token, "")
        return text


class PolicyThoughts(BaseThinkingReasoningParser):
    """Reads the thoughts of an answer in the form of the policy's chat template."""

    marks: ClassVar[tuple[str, str]]

    @property
    def start_token(self) -> str:
        return self.marks[0]

    @property
    def end_token(self) -> str:
        return self.marks[1]

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Return the thoughts and the rest; an answer without marks has no thoughts."""
        if self.start_token in model_output or self.end_token in model_output:
            return super().extract_reasoning(model_output, request)
        return None, model_output


class PolicyParser(DelegatingParser):
    """Reads the thoughts and the calls of an answer."""

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """Return the new part of a stream. The last part has all that was held back."""
        delta = super().parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        parser = self.tool_parser
        rest = parser.flush() if finished and isinstance(parser, PolicyToolParser) else None
        if delta is None or rest is None:
            return delta or rest
        delta.content = f"{delta.content or ''}{rest.content or ''}" or None
        delta.tool_calls = [*(delta.tool_calls or []), *(rest.tool_calls or [])]
        return delta


def parser_of(renderer: Renderer) -> type[PolicyParser] | None:
    """Return the parser of answers in the form of a chat template; None: it has no such form."""
    tool_parser = thoughts = None
    tokenizer = renderer.tokenizer
    if isinstance(renderer.calls, CallForm):
        parts = {"form": renderer.calls, "special": list(tokenizer.all_special_tokens)}
        tool_parser = type("ToolParser", (PolicyToolParser,), parts)
    form = renderer.thoughts
    marks = tuple(each.strip() for each in form.blocks[0])
    if (form.asked or form.field) and set(marks) <= set(tokenizer.get_vocab()):
        thoughts = type("Thoughts", (PolicyThoughts,), {"marks": marks})
    if tool_parser is None and thoughts is None:
        return None
    classes = {"tool_parser_cls": tool_parser, "reasoning_parser_cls": thoughts}
    return type("Parser", (PolicyParser,), classes)


def replace_missing_backend() -> None:
    """Let vLLM check grammars without the package lm-format-enforcer.

    vLLM (0.32) imports all its backends of grammars before it checks one. It chooses xgrammar or
    llguidance by itself; the lock of packages leaves the third one out.
    """
    if ENFORCER not in sys.modules and importlib.util.find_spec(ENFORCER) is None:
        stand_in: Any = ModuleType(ENFORCER)
        stand_in.TokenEnforcer = object  # An annotation of a class of vLLM.
        sys.modules[ENFORCER] = stand_in


def make_app(engine: Engine, renderer: Renderer, *, name: str) -> FastAPI:
    """Return the server of an engine with the API's id of its model.

    The engine's temperature applies to requests without their own; they sample from all tokens.
    """
    replace_missing_backend()
    llm, cfg = engine.llm, engine.options
    client: Any = AdapterClient(llm, engine.adapter)
    parser = parser_of(renderer)
    models = ServedModel(client, [BaseModelPath(name=name, model_path=name)])
    online = PolicyRenderer(
        llm.model_config,
        llm.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        exclude_tools_when_tool_choice_none=True,
    )
    online.policy = renderer
    online.parser = parser
    online.warmup()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    state: Any = app.state
    state.args = SimpleNamespace(log_error_stack=False)
    state.engine_client = client
    state.openai_serving_models = models
    chat = OpenAIServingChat(
        client,
        models,
        "assistant",
        online_renderer=online,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        exclude_tools_when_tool_choice_none=True,
    )
    messages = AnthropicServingMessages(
        client,
        models,
        "assistant",
        online_renderer=online,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
    )
    completion = OpenAIServingCompletion(
        client, models, online_renderer=online, request_logger=None
    )
    responses = OpenAIServingResponses(
        client,
        models,
        online,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
    )
    state.serving_tokenization = ServingTokenization(
        models, online, chat_template=None, chat_template_content_format="auto"
    )
    sampling = {"temperature": cfg.temperature, "top_p": 1.0, "top_k": -1}
    for serving in (chat, messages, completion, responses):
        serving.default_sampling_params = dict(sampling)
    chat.parser_cls = messages.parser_cls = responses.parser = parser
    state.openai_serving_chat = chat
    state.openai_serving_completion = completion
    state.openai_serving_responses = responses
    state.anthropic_serving_messages = messages
    for api in (chat_api, completion_api, models_api, responses_api, anthropic_api, tokenize_api):
        api.attach_router(app)
    app.get("/v1/models/{model:path}")(_show_model)
    init_exception_handler(app)
    for kind in (EngineGenerateError, Exception):
        app.exception_handler(kind)(_report_failure)
    return app


async def _report_failure(request: Request, error: Exception) -> JSONResponse:
    """Log an unexpected error, and answer with it."""
    logger.error("request failed unexpectedly path=%s", request.url.path, exc_info=error)
    cause = error.__cause__ or error  # vLLM's own error has no text.
    text = f"{type(cause).__name__}: {cause}"
    details = {"message": text, "type": "server_error", "param": None, "code": "policy_failed"}
    return JSONResponse({"error": details}, status_code=500)


async def _show_model(model: str, raw_request: Request) -> JSONResponse:
    """Return the model by its id."""
    listed = await raw_request.app.state.openai_serving_models.show_available_models()
    for model_card in listed.data:
        if model_card.id == model:
            return JSONResponse(model_card.model_dump())
    ids = ", ".join(model_card.id for model_card in listed.data)
    error = {"message": f"model {model:.80}: the only model is {ids}", "type": "not_found_error"}
    error |= {"param": "model", "code": "model_not_found"}
    return JSONResponse({"error": error}, status_code=404)
