"""Encodes a conversation to token ids one turn at a time. Sampled tokens are never encoded again.

An observation is plain text: a control token that it contains (`<|im_end|>`) is encoded as its
letters.

The chat template is rendered twice with marker texts. The text between the assistant's marker and
the next user's marker is kept as a string. So any template works that appends turns one after
another. A template that rewrites earlier turns is refused at start.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError

from actor.rollout.context import least_prompt
from actor.rollout.folding import least_of_branches
from common.config.run_config import ActorSection
from common.control_tokens import ControlTokens
from common.errors import ConfigError
from common.formats.calls import ARGUMENTS, NAME, CallForm, as_call, each_text
from common.formats.chat_template import render_chat

# Size of the cache of encoded texts. Episodes of a group begin with the same text.
NUM_KNOWN_TEXTS = 256
Message = dict[str, Any]
CALL_ID = "call{:05}"  # The format that the strictest template requires.
USER = "\u2402user\u2403"
ASSISTANT = "\u2402assistant\u2403"
NEXT = "\u2402next\u2403"


class Renderer:
    """Encodes observations for one tokenizer.

    Example (ChatML):
        first_prompt("hi")        <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n
        after_action("ok", True)  \\n<|im_start|>user\\nok<|im_end|>\\n<|im_start|>assistant\\n
        after_action("ok", False) the same behind an <|im_end|> that the model did not sample
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self.num_tokens = len(tokenizer)
        self._known = lru_cache(NUM_KNOWN_TEXTS)(self._control.encode_between)
        first = self._rendered([{"role": "user", "content": USER}])
        self._before_first, _, self._after_user = first.partition(USER)
        self._after_first = self._after_user
        if USER not in first:
            raise ConfigError("model.path: the chat template drops the user's text")
        both = self._rendered(
            [
                {"role": "user", "content": USER},
                {"role": "assistant", "content": ASSISTANT},
                {"role": "user", "content": NEXT},
            ]
        )
        head, _, tail = both.partition(ASSISTANT)
        between, _, after_next = tail.partition(NEXT)
        if head != first or NEXT not in tail or after_next != self._after_user:
            raise ConfigError(
                "model.path: the chat template rewrites earlier turns, so token ids cannot be kept;"
                f" it renders {both!r} after {first!r}"
            )
        self.end_of_turn_ids = self._end_of_turn(between)
        self._end_of_turn_text: str = tokenizer.decode(self.end_of_turn_ids[:1])
        self._between = between.removeprefix(self._end_of_turn_text)

    def _rendered(self, messages: Sequence[Message], *, tools: list[Any] | None = None) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError("model.path: the tokenizer has no chat template")
        return render_chat(self._tokenizer, with_ids(messages), tools=tools)

    @cached_property
    def calls(self) -> CallForm | str:
        """The chat template's format of tool calls, or the reason why it supports no tools."""
        try:
            full = self._call_of(ARGUMENTS)
            bare = self._call_of({})
            return CallForm.of(*map(self._as_sampled, (full, bare)))
        except (TemplateError, TypeError) as error:
            return f"the policy's chat template cannot render tools: {error}"
        except ValueError as error:
            return f"the policy's chat template {error}"

    def _call_of(self, arguments: dict[str, Any]) -> str:
        """Return a tool call as the template writes it. Raises: ValueError: it cannot write one."""
        told = {"name": "probe_tool", "description": "", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": told}]
        user = {"role": "user", "content": USER}
        said = {"role": "assistant", "content": ASSISTANT, "tool_calls": [as_call(NAME, arguments)]}
        first = self._rendered([user], tools=tools)
        text = self._rendered([user, said, {"role": "tool", "content": NEXT}], tools=tools)
        if "probe_tool" not in text or NAME not in text or NEXT not in text:
            raise ValueError("does not render tools, tool calls or tool results")
        _, has_text, call = text.partition(ASSISTANT)  # Some templates drop the text beside calls.
        if not (has_text or text.startswith(first)):
            raise ValueError(f"does not render tool calls as turns: {text!r:.1000}")
        call, is_ended, _ = (call or text.removeprefix(first)).partition(self._end_of_turn_text)
        if not is_ended:
            raise ValueError(f"does not end a turn with tool calls: {text!r:.1000}")
        return call

    def _as_sampled(self, said: str) -> str:
        """Return a text of the template as it reads when the policy has sampled it."""
        return self.whole_text(self._tokenizer.encode(said, add_special_tokens=False))

    def _end_of_turn(self, between: str) -> list[int]:
        ids = self._tokenizer.encode(between, add_special_tokens=False)
        if not ids or ids[0] not in self._tokenizer.all_special_ids:
            raise ConfigError(
                "model.path: the chat template does not end a turn with a special token"
            )
        eos = self._tokenizer.eos_token_id
        return [ids[0]] if eos is None or eos == ids[0] else [ids[0], eos]

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        """Return the ids of the first user turn, up to the start of the assistant's turn.

        Args:
            before: an instruction and the assistant's answer to it, which come first.
        """
        if before is None:
            return list(self._known(self._before_first, text, self._after_first))
        return self.conversation([*before, text])

    def conversation(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of alternating messages, up to the start of the assistant's next turn.

        Args:
            texts: an odd number of messages; the user's are first and last.
        """
        ids = self.first_prompt(texts[0])
        for answer, text in zip(texts[1::2], texts[2::2], strict=True):
            ids += self._known("", answer, self._end_of_turn_text)
            ids += self.after_turn(text, is_stopped=True)
        return ids

    def after_turn(self, text: str, *, is_stopped: bool) -> list[int]:
        """Return the ids between the sampled turn and the next one: a user message with `text`.

        Args:
            is_stopped: the sampled turn ended with an end-of-turn token. If not, one is inserted
                here. It was not sampled and is therefore never trained on.
        """
        return self._framed(self._between, text, self._after_user, is_stopped=is_stopped)

    def after_action(self, observation: str, *, is_stopped: bool) -> list[int]:
        """Return the same ids for the environment's observation after an action."""
        return self.after_turn(observation, is_stopped=is_stopped)

    def of(self, env: str, tools: Sequence[Message] = ()) -> "Renderer":
        """Return the renderer of an environment's episodes, whose actions may call `tools`."""
        return self

    def without_tools(self) -> "Renderer":
        """Return the renderer of conversations without tools."""
        return self

    def _framed(self, before: str, text: str, after: str, *, is_stopped: bool) -> list[int]:
        lead = "" if is_stopped else self._end_of_turn_text
        return list(self._known(lead + before, text, after))

    def of_messages(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of any conversation, up to the start of the assistant's turn.

        Raises: ValueError: the chat template refuses it; the message gives the reason.
        """
        return self._control.encode(self._safely(messages, tools))

    def after_calls(
        self,
        messages: list[dict[str, Any]],
        *,
        is_stopped: bool,
        has_calls: bool,
        tools: Sequence[dict[str, Any]],
    ) -> list[int]:
        """Return the ids between an answer and the next one: `after_action` for any messages.

        Args:
            has_calls: the answer consisted of calls, which a template may require before their
                results.

        Raises: ValueError: the chat template refuses it; the message gives the reason.
        """
        said: dict[str, Any] = {"role": "assistant", "content": ASSISTANT}
        if has_calls:
            said = {**said, "content": "", "tool_calls": [as_call(ASSISTANT, {})]}
        whole = self._safely([{"role": "user", "content": USER}, said, *messages], tools)
        _, _, tail = whole.partition(ASSISTANT)
        _, end, after = tail.partition(self._end_of_turn_text)
        if not end:
            raise ValueError("the chat template does not end the assistant's turn")
        return self._control.encode(after if is_stopped else end + after)

    def _safely(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Return a conversation as text for `ControlTokens.encode`. Raises: ValueError."""
        named = ("role", "type")  # The actor writes these fields, so they need no escaping.
        broken = self._control.broken
        safe = [
            {k: v if k in named else each_text(v, broken) for k, v in each.items()}
            for each in messages
        ]
        try:
            return self._rendered(safe, tools=[each_text(each, broken) for each in tools] or None)
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"the chat template failed: {error}") from error

    def completion(self, text: str) -> list[int]:
        """Return the ids of a bare text. Control tokens in it are encoded as such."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def check_room(self, actor: ActorSection) -> None:
        """Check that the beginning of a page fits beside a turn.

        Raises: ConfigError: it does not fit, so that no episode could ever be played.
        """
        turn_tokens = actor.max_turn_tokens
        needed = least_prompt(self, actor, turn_tokens)
        needed = max(needed, least_of_branches(self, actor, turn_tokens)) + turn_tokens
        if actor.max_model_len < needed:
            asides = {
                "actor.plan": actor.plan,
                "actor.reflect_every": actor.reflect_every,
                "actor.reflect_on_invalid": actor.reflect_on_invalid,
            }
            named = [f"actor.context={actor.context.value}"]
            named += [f"{key}={str(value).lower()}" for key, value in asides.items() if value]
            raise ConfigError(
                f"actor.max_model_len={actor.max_model_len}: no observation fits with"
                f" {', '.join(named)} and actor.max_turn_tokens={turn_tokens};"
                f" use at least actor.max_model_len={needed}"
            )

    def action_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled action without special tokens."""
        return self.plain_text(token_ids).strip()

    def plain_text(self, token_ids: list[int]) -> str:
        """Return the text of tokens without special tokens. Whitespace at its ends is kept."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def whole_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled answer with its special tokens, except those that end it."""
        while token_ids and token_ids[-1] in self.end_of_turn_ids:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids)

    def read_answer(
        self, token_ids: list[int], tools: Sequence[Message]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a sampled answer and its tool calls, in the format of chat templates.

        Raises: AssertionError: this chat template supports no tools.
        """
        assert isinstance(self.calls, CallForm)
        said, calls = self.calls.read(self.whole_text(token_ids), tools)
        if not calls:
            return self.action_text(token_ids), []
        plain = self.action_text(self._tokenizer.encode(said, add_special_tokens=False))
        return plain, [as_call(*each) for each in calls]


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls and results have ids, which some templates require."""
    found: list[Message] = []
    place = 0
    for each in messages:
        if each["role"] == "tool":
            each = {"tool_call_id": CALL_ID.format(place), **each}
            place = place + 1
        else:
            place = 0
        if calls := each.get("tool_calls"):
            named = [{"id": CALL_ID.format(i), **call} for i, call in enumerate(calls)]
            each = {**each, "tool_calls": named}
        found.append(each)
    return found
