"""Conversation text -> token ids, one turn at a time: what was sampled is never encoded again.

An observation is text: a control token that it spells out (`<|im_end|>`) is encoded as its letters.

The chat template is asked twice with marker texts, and what it puts between an assistant's text and
the next user's text is kept as a string. So any template works whose turns follow one another; a
template that rewrites earlier turns is refused at start.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError

from actor.agents.tool_calls import BEGIN, END, PROBE, as_call, each_text, read_calls
from actor.rollout.context import least_prompt
from actor.rollout.folding import least_of_branches
from common.config.run_config import ActorSection
from common.control_tokens import ControlTokens
from common.errors import ConfigError

NUM_KNOWN_TEXTS = 256  # latest ones; members of a group begin with the same
Message = dict[str, Any]
USER, ASSISTANT, NEXT = "\u2402user\u2403", "\u2402assistant\u2403", "\u2402next\u2403"


class Renderer:
    """Renders observations for one tokenizer.

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
        first = self._template([{"role": "user", "content": USER}])
        self._before_first, _, self._after_user = first.partition(USER)
        if USER not in first:
            raise ConfigError("the chat template drops the user's text")
        both = self._template(
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
                "the chat template rewrites earlier turns, so token ids cannot be kept; "
                f"it renders {both!r} after {first!r}"
            )
        self.end_of_turn_ids = self._end_of_turn(between)
        self._end_of_turn_text: str = tokenizer.decode(self.end_of_turn_ids[:1])
        self._between = between.removeprefix(self._end_of_turn_text)

    def _template(self, messages: Sequence[Message]) -> str:
        return self._rendered(messages)

    def _rendered(self, messages: Sequence[Message], *, tools: list[Any] | None = None) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError("model.path: the tokenizer has no chat template")
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )

    @cached_property
    def why_no_tools(self) -> str:
        """Why tools cannot be offered with this chat template; "" if they can."""
        call = as_call(PROBE["name"], PROBE["arguments"])
        told = {"name": "probe_tool", "description": "", "parameters": {"type": "object"}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [{"role": "user", "content": USER}, said, {"role": "tool", "content": NEXT}]
        try:
            text = self._rendered(messages, tools=[{"type": "function", "function": told}])
        except (TemplateError, TypeError) as error:
            return f"the policy's chat template refuses them: {error}"
        _, _, after = text.partition(USER)
        _, begin, after = after.partition(BEGIN)
        answer, _, _ = after.partition(self._end_of_turn_text)
        if "probe_tool" not in text or PROBE["name"] not in text or NEXT not in text:
            return "the policy's chat template has no place for them"
        if read_calls(begin + answer)[1] != [call]:
            return f"the policy's chat template writes no calls as {BEGIN}{{JSON}}{END}"
        return ""

    def _end_of_turn(self, between: str) -> list[int]:
        ids = self._tokenizer.encode(between, add_special_tokens=False)
        if not ids or ids[0] not in self._tokenizer.all_special_ids:
            raise ConfigError("the chat template does not end a turn with a special token")
        eos = self._tokenizer.eos_token_id
        return [ids[0]] if eos is None or eos == ids[0] else [ids[0], eos]

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        """Return the ids of the first user turn, up to where the assistant starts.

        Args:
            before: an instruction and the assistant's answer to it, which come first.
        """
        if before is None:
            return list(self._known(self._before_first, text, self._after_user))
        return self.conversation([*before, text])

    def conversation(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of what user and assistant said in turn, up to where the latter starts.

        Args:
            texts: an odd number; the user is first and last.
        """
        ids = self.first_prompt(texts[0])
        for answer, text in zip(texts[1::2], texts[2::2], strict=True):
            ids += self._known("", answer, self._end_of_turn_text)
            ids += self.after_turn(text, is_stopped=True)
        return ids

    def after_turn(self, text: str, *, is_stopped: bool) -> list[int]:
        """Return the ids between what was sampled and what is next: the user says `text`.

        Args:
            is_stopped: what was sampled ended with an end-of-turn token of its own; if not, one is
                put in here, unsampled and therefore never trained on.
        """
        return self._framed(self._between, text, self._after_user, is_stopped=is_stopped)

    def after_action(self, observation: str, *, is_stopped: bool) -> list[int]:
        """Return the same for what an environment says of an action."""
        return self.after_turn(observation, is_stopped=is_stopped)

    def of(self, env: str, tools: Sequence[Message] = ()) -> "Renderer":
        """Return what renders an environment's episodes, whose actions may call `tools`."""
        return self

    def without_tools(self) -> "Renderer":
        """Return what renders conversations of texts alone."""
        return self

    def _framed(self, before: str, text: str, after: str, *, is_stopped: bool) -> list[int]:
        lead = "" if is_stopped else self._end_of_turn_text
        return list(self._known(lead + before, text, after))

    def of_messages(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of any conversation, up to where the assistant starts.

        Raises: ValueError: the chat template refuses it, and why.
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
        """Return the ids between a sampled answer and the next: as `after_action`, of any messages.

        Args:
            has_calls: the answer was calls, which a template may want before their results.

        Raises: ValueError: the chat template refuses it, and why.
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
        named = ("role", "type")  # are ours
        broken = self._control.broken
        safe = [
            {k: v if k in named else each_text(v, broken) for k, v in each.items()}
            for each in messages
        ]
        try:
            if not tools:
                return self._template(safe)
            return self._rendered(safe, tools=[each_text(each, broken) for each in tools])
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"the chat template: {error}") from error

    def completion(self, text: str) -> list[int]:
        """Return the ids of a bare text, control tokens included that it spells out."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def check_room(self, actor: ActorSection) -> None:
        """Return if a page fits beside a turn, were it only the beginning of one.

        Raises: ConfigError: it does not, so that no episode could ever be played.
        """
        needed = least_prompt(self, actor, actor.max_turn_tokens)
        needed = max(needed, least_of_branches(self, actor, actor.max_turn_tokens))
        if actor.max_model_len - actor.max_turn_tokens < needed:
            raise ConfigError(
                f"actor.max_model_len={actor.max_model_len}: with actor.max_turn_tokens="
                f"{actor.max_turn_tokens} no page fits, which takes {needed} tokens at least"
            )

    def action_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled action without special tokens."""
        return self.plain_text(token_ids).strip()

    def plain_text(self, token_ids: list[int]) -> str:
        """Return the text of tokens without special ones, whatever it begins and ends with."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def read_answer(self, token_ids: list[int]) -> tuple[str, list[dict[str, Any]]]:
        """Return what a sampled action says, and its tool calls, as chat templates take them."""
        while token_ids and token_ids[-1] in self.end_of_turn_ids:
            token_ids = token_ids[:-1]
        text, calls = read_calls(self._tokenizer.decode(token_ids))
        return (text, calls) if calls else (self.action_text(token_ids), [])
