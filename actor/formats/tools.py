"""Function calling by the model's own chat template: tools in the prompt, answers call them."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from actor.rollout.context import Render
from actor.rollout.render import NEXT, USER, Message, Renderer
from common.agent_formats import ARGUMENT, NAME, NO_TOOLS, VALUE, CallForm, read_react, sent
from common.config.evaluation import AgentFormat
from common.errors import ConfigError

Read = Callable[[list[int]], tuple[str, str | None]]
CALL_ID = "call00000"  # of the form that the strictest template wants
MAX_NAME_CHARS = 64


def make_renderer(tokenizer: Any, kind: AgentFormat) -> Renderer:
    """Return what renders for a policy that answers so.

    Raises: ConfigError: the chat template cannot be used, or knows no tools and is to call some.
    """
    is_calling = kind is AgentFormat.FUNCTION_CALL
    return ToolRenderer(tokenizer, env=NAME) if is_calling else Renderer(tokenizer)


def load_renderer(path: str | Path, kind: AgentFormat) -> Renderer:
    """Return that of a model's folder; see `make_renderer`."""
    from transformers import AutoTokenizer  # here only: it takes seconds to load

    return make_renderer(AutoTokenizer.from_pretrained(path, local_files_only=True), kind)


def reader_of(render: Render, kind: AgentFormat, *, is_whole: bool) -> Read:
    """Return what an answer's tokens say, and the action in it; None: there is none.

    Args:
        is_whole: as in `read_react`.
    """
    found: Callable[[str], str | None]
    if kind is AgentFormat.FUNCTION_CALL:
        if not isinstance(render, ToolRenderer):
            raise ConfigError(f"actor.format={kind.value}: {type(render).__name__} calls no tools")
        found = render.called
    elif kind is AgentFormat.REACT:
        found = partial(read_react, is_whole=is_whole)
    else:
        found = str

    def read(token_ids: list[int]) -> tuple[str, str | None]:
        said = render.action_text(token_ids)
        return said, found(said)

    return read


def rendering(render: Render, env: str, tools: Sequence[Message]) -> Render:
    """Return what renders an environment's episodes, where it is made for a chat template."""
    return render.of(env, tools) if isinstance(render, Renderer) else render


def tool_of(env: str) -> Message:
    """Return the one tool that an environment of texts is, as chat templates are given it."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", env)[:MAX_NAME_CHARS]
    text = "Performs one action in the environment; returns what is observed then."
    action = {"type": "string", "description": "the action, as the environment words it"}
    parameters = {"type": "object", "properties": {ARGUMENT: action}, "required": [ARGUMENT]}
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


class ToolRenderer(Renderer):
    """Renders an environment's episodes: it is a tool, what is observed is the tool's answer."""

    def __init__(self, tokenizer: Any, *, env: str, tools: Sequence[Message] = ()) -> None:
        """Ask the template.

        Args:
            tools: of the environment, as in `EnvSpec`; none: it is one itself.

        Raises: ConfigError: it shows no tools, or writes calls so that they cannot be read.
        """
        self._own = [{"type": "function", "function": dict(each)} for each in tools]
        self._tools = self._own or [tool_of(env)]
        self._names = [str(each["function"]["name"]) for each in self._tools]
        self._by_env: dict[str, ToolRenderer] = {}
        super().__init__(tokenizer)
        user = {"role": "user", "content": USER}
        if self._template([user]) == self._rendered([user]):
            raise ConfigError(NO_TOOLS)
        function = {"name": NAME, "arguments": {ARGUMENT: VALUE}}
        call = {"type": "function", "id": CALL_ID, "function": function}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = {"role": "tool", "name": NAME, "tool_call_id": CALL_ID, "content": NEXT}
        whole, first = self._template([user, called, told]), self._template([user])
        end = self._end_of_turn_text
        said, is_ended, rest = whole.removeprefix(first).partition(end)
        self._before_told, has_told, self._after_told = rest.partition(NEXT)
        if not (whole.startswith(first) and is_ended and has_told):
            raise ConfigError(
                "actor.format=function_call: the chat template of model.path shows calls and their"
                f" answers otherwise than turns: {whole!r:.1000} after {first!r:.1000}"
            )
        self._form = CallForm.of(self._as_sampled(said))
        if self._own and self._form.pattern is not None:
            raise ConfigError(
                "actor.format=function_call: the chat template of model.path writes calls in tags,"
                f" and those of {env}'s own tools are read as JSON only"
            )

    def of(self, env: str, tools: Sequence[Message] = ()) -> Renderer:
        """Return what renders an environment's episodes, whose actions may call `tools`."""
        if env not in self._by_env:
            self._by_env[env] = ToolRenderer(self._tokenizer, env=env, tools=tools)
        return self._by_env[env]

    def without_tools(self) -> Renderer:
        """Return what renders conversations of texts alone."""
        return Renderer(self._tokenizer)

    def after_action(self, observation: str, *, is_stopped: bool) -> list[int]:
        """Return the ids between an answer and the next: a tool says `observation`."""
        before, after = self._before_told, self._after_told
        return self._framed(before, observation, after, is_stopped=is_stopped)

    def called(self, answer: str) -> str | None:
        """Return what an environment is sent for an answer; None: it calls no tool, or several."""
        return sent(self._form.read(answer), self._names, has_one=not self._own)

    def _as_sampled(self, said: str) -> str:
        """Return a text of the template as it reads where the policy has sampled it."""
        return self.action_text(self._tokenizer.encode(said, add_special_tokens=False))

    def _template(self, messages: Sequence[Message]) -> str:
        try:
            return self._rendered(messages, tools=self._tools)
        except (TemplateError, TypeError) as error:
            raise ConfigError(
                f"actor.format=function_call: the chat template of model.path: {error}"
            ) from error
