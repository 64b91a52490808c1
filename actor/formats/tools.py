"""Function calling with the model's own chat template: tools in prompts, calls in answers."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from actor.formats.call_turn import CallTurn
from actor.formats.renderer import Renderer
from actor.rollout.context import Render
from actor.rollout.env_client import HubStepResult
from common.config.actor import AgentFormat
from common.errors import ConfigError
from common.formats.answers import ARGUMENT, CALL_BEGIN, NO_TOOLS, read_react, sent
from common.formats.calls import NAME, CallForm
from common.formats.turn_ends import TurnEnd
from common.formats.turns import USER, Message

Read = Callable[[list[int]], tuple[str, str | None]]
MAX_NAME_CHARS = 64
MAX_RENDERERS = 256  # Lists of tools whose measured templates are kept.


def make_renderer(tokenizer: Any, kind: AgentFormat) -> Renderer:
    """Return the renderer for a policy with this format of answers.

    Raises: ConfigError: the chat template cannot be used, or lacks the tools that the format needs.
    """
    is_calling = kind is AgentFormat.FUNCTION_CALL
    return ToolRenderer(tokenizer, env=NAME) if is_calling else Renderer(tokenizer)


def load_renderer(path: str | Path, kind: AgentFormat) -> Renderer:
    """Return the renderer for a model's folder; see `make_renderer`."""
    from transformers import AutoTokenizer  # Imported here, because the import takes seconds.

    return make_renderer(AutoTokenizer.from_pretrained(path, local_files_only=True), kind)


def reader_of(render: Render, kind: AgentFormat, *, is_whole: bool) -> Read:
    """Return a function from an answer's tokens to its text and action; None: no action.

    Args:
        is_whole: as in `read_react`.
    """
    if kind is AgentFormat.FUNCTION_CALL:
        if not isinstance(render, ToolRenderer):
            raise ConfigError(
                f"actor.format={kind.value}: {type(render).__name__} cannot render tool calls"
            )
        return lambda ids: (render.action_text(ids), render.called(ids))
    action_of: Callable[[str], str | None] = str
    if kind is AgentFormat.REACT:
        action_of = partial(read_react, is_whole=is_whole)

    def read(token_ids: list[int]) -> tuple[str, str | None]:
        text = render.action_text(token_ids)
        return text, action_of(text)

    return read


def fault_of(render: Render, token_ids: list[int]) -> str:
    """Return why an answer calls no tool, for the policy to read; "" without tools."""
    return render.fault_of(token_ids) if isinstance(render, ToolRenderer) else ""


def explained(render: Render, token_ids: list[int], result: HubStepResult) -> str:
    """Return the observation after an invalid action; after a faulty call, with the reason."""
    fault = fault_of(render, token_ids)
    return f"[invalid call: {fault}]\n{result.observation}" if fault else result.observation


def rendering(render: Render, env: str, tools: Sequence[Message]) -> Render:
    """Return the renderer of an environment's episodes; unchanged if it has no chat template."""
    return render.of(env, tools) if isinstance(render, Renderer) else render


def tool_of(env: str) -> Message:
    """Return the tool that stands for an environment whose actions are texts."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", env)[:MAX_NAME_CHARS]
    text = "Performs one action in the environment; returns what is observed then."
    action = {"type": "string", "description": "the action, as the environment words it"}
    parameters = {"type": "object", "properties": {ARGUMENT: action}, "required": [ARGUMENT]}
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


class ToolRenderer(Renderer):
    """Renders episodes in which the environment is a tool and its observations are tool results."""

    def __init__(self, tokenizer: Any, *, env: str, tools: Sequence[Message] = ()) -> None:
        """Analyse the template with marker texts.

        Args:
            tools: the environment's tools, as in `EnvSpec`; none: the environment is the only tool.

        Raises: ConfigError: the template supports no tools, or its calls cannot be parsed.
        """
        self._own = [{"type": "function", "function": dict(each)} for each in tools]
        self._tools = self._own or [tool_of(env)]
        self._names = [str(each["function"]["name"]) for each in self._tools]
        self._by_tools: dict[str, ToolRenderer] = {}
        super().__init__(tokenizer)
        if isinstance(self.calls, str):
            raise ConfigError(f"actor.format=function_call: model.path: {self.calls}")
        first = self._template([{"role": "user", "content": USER}])
        if first == self.rendered([{"role": "user", "content": USER}]):
            raise ConfigError(NO_TOOLS)
        self._before_first, _, self._after_first = first.partition(USER)
        self._called = self._call_of_own(self._names[0])
        self._called_by_name = {self._names[0]: self._called}
        self._call_end = self._end_of_turn(self._called.between, self._called.ended)
        ends = (*self.end_of_turn_ids, self._call_end.run[0])
        self.end_of_turn_ids = list(dict.fromkeys(ends))

    def _call_of_own(self, name: str) -> CallTurn:
        """Return the turn of a call of a tool and its result."""
        try:
            assert isinstance(self.calls, CallForm)
            return self._measured_call(tools=self._tools, name=name, form=self.calls)
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                f"actor.format=function_call: the chat template of model.path: {error}"
            ) from error

    def _turn_of(self, answer: Sequence[int]) -> CallTurn:
        """Return the turn of the tool that an answer calls; of the first tool if it calls none.

        A template may write the tool's name before its result.
        """
        if len(self._names) == 1 or not answer:
            return self._called
        assert isinstance(self.calls, CallForm)
        _, calls = self.calls.read(self.call_text(list(answer)), self._tools)
        name = calls[0][0] if len(calls) == 1 else ""
        if name not in self._names:
            return self._called
        if name not in self._called_by_name:
            self._called_by_name[name] = self._call_of_own(name)
        return self._called_by_name[name]

    def _past_form(self, answer: list[int]) -> tuple[str, TurnEnd]:
        if self._is_text(answer):
            return super()._past_form(answer)
        return self._called.answered, self._call_end

    def _is_text(self, answer: Sequence[int]) -> bool:
        """Return whether an answer is a text for an environment with tools of its own."""
        assert isinstance(self.calls, CallForm)
        if not (self._own and answer):
            return False
        text = self.call_text(list(answer))
        _, calls = self.calls.read(text, self._tools)
        return not (calls or self.calls.fault(text) or CALL_BEGIN.search(text))

    def of(self, env: str, tools: Sequence[Message] = ()) -> Renderer:
        """Return the renderer of an environment's episodes, whose actions may call `tools`."""
        key = json.dumps([env, *tools], sort_keys=True)
        if key not in self._by_tools:
            if len(self._by_tools) >= MAX_RENDERERS:  # Items may have tools of their own.
                del self._by_tools[next(iter(self._by_tools))]
            self._by_tools[key] = ToolRenderer(self.tokenizer, env=env, tools=tools)
        return self._by_tools[key]

    def without_tools(self) -> Renderer:
        """Return the renderer of conversations without tools."""
        return Renderer(self.tokenizer)

    def opened(self, messages: list[dict[str, Any]], text: str) -> list[int]:
        """Return the ids of messages and a user's message after them; see `of_messages`.

        Raises: ValueError: the chat template refuses or drops one of them.
        """
        self.check_shown(messages, tools=self._tools)
        asked = {"role": "user", "content": text}
        return self.of_messages([*messages, asked], tools=self._tools)

    def after_action(
        self,
        observation: str,
        *,
        is_stopped: bool,
        end: int | None = None,
        answer: Sequence[int] = (),
    ) -> list[int]:
        """Return the ids between an answer and the next one: a tool result with `observation`.

        The observation after a text is a user's message.

        Args:
            answer: the sampled answer, whose tool the result belongs to; (): the first tool.
        """
        if self._is_text(answer):
            return self.after_turn(observation, is_stopped=is_stopped, end=end)
        called = self._turn_of(answer)
        return self._framed(
            self._call_end,
            called.between,
            called.shown(observation),
            called.after,
            is_stopped=is_stopped,
            end=end,
        )

    def called(self, token_ids: list[int]) -> str | None:
        """Return the action for the environment; None: a faulty call, several calls, or none.

        With tools of the environment, an answer without a call is the action itself, and the
        environment decides on the name of a called tool: it may offer further tools later. A call
        that is not in the form of the chat template is faulty.
        """
        assert isinstance(self.calls, CallForm)
        if self._is_text(token_ids):
            return self.action_text(token_ids) or None
        _, calls = self.calls.read(self.call_text(token_ids), self._tools)
        names = [name for name, _ in calls] if self._own else self._names
        return sent(calls, names, has_one=not self._own)

    def fault_of(self, token_ids: list[int]) -> str:
        """Return why an answer is no valid call, for the policy to read; "" if it is one."""
        assert isinstance(self.calls, CallForm)
        text = self.call_text(token_ids)
        if fault := self.calls.fault(text):
            return f"the call cannot be read: {fault}"
        _, calls = self.calls.read(text, self._tools)
        if len(calls) != 1:
            return f"the answer has {len(calls)} calls; give one"
        name, _ = calls[0]
        if not self._own and name not in self._names:
            return f"there is no tool {name[:40]!r}; the tools are {', '.join(self._names)}"
        is_valid = self.called(token_ids) is not None
        return "" if is_valid else f"the call has no text as its argument {ARGUMENT!r}"

    def _template(self, messages: Sequence[Message]) -> str:
        try:
            return self.rendered(messages, tools=self._tools)
        except (TemplateError, TypeError) as error:
            raise ConfigError(
                f"actor.format=function_call: the chat template of model.path failed: {error}"
            ) from error
