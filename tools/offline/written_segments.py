"""The segments of conversations, as a rollout of the same model would have them."""

from dataclasses import dataclass
from typing import Any

from actor.formats.renderer import RESULT_ID, Renderer, in_order
from actor.formats.thoughts import FIELDS
from common.config.actor import KeepThinking
from tools.exchange.agent_traj import Conversation, Message
from tools.offline.written_answers import AnswerWriter, WrittenAnswer

Part = tuple[list[int], bool]  # Consecutive token ids, and whether they are trained.


def segments_of(
    conversation: Conversation, writer: AnswerWriter, keep: KeepThinking
) -> list[list[Part]]:
    """Return the parts of each segment; with `KeepThinking.ALL`, there is one segment.

    Raises: ValueError: the chat template cannot show a message; the text has the field's name.
    """
    steps = _steps_of(conversation, writer)
    num_kept = {KeepThinking.ALL: len(steps), KeepThinking.LAST: 1, KeepThinking.NONE: 0}[keep]
    segments: list[list[Part]] = []
    context: list[int] = []  # Tokens of the newest segment.
    for number, step in enumerate(steps):
        if step.answer is None and segments:  # The text after the last answer.
            segments[-1].append((step.prompt, False))
            break
        num_forgotten = max(0, number - num_kept)
        shown = [each for old in steps[:num_forgotten] for each in _forgotten(old, writer)]
        shown += [each for old in steps[num_forgotten:number] for each in _kept(old, writer)]
        shown += _asked(step, writer)
        if context and shown[: len(context)] == context:
            segments[-1].append((shown[len(context) :], False))
        else:
            segments.append([(shown, False)])
        sampled = [] if step.answer is None else step.answer.sampled
        segments[-1].append((sampled, step.is_trained))
        context = [*shown, *sampled]
    return segments


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenTurn:
    """A prompt from the answer before it, with its answer; None: the conversation ends."""

    prompt: list[int]
    answer: WrittenAnswer | None
    is_trained: bool = False


def _steps_of(conversation: Conversation, writer: AnswerWriter) -> list[_WrittenTurn]:
    tools = conversation.tools
    steps: list[_WrittenTurn] = []
    shown: list[dict[str, Any]] = []  # Messages since the last answer.
    last: WrittenAnswer | None = None
    calls: list[dict[str, Any]] = []  # Calls of the last answer.
    given: list[dict[str, Any]] = []  # The same calls, as the record has them.
    for each in conversation.messages:
        message = _as_chat(each)
        if not each.is_agent:
            shown.append(message)
            continue
        answer = writer.write(message, tools=tools)
        prompt = _prompt(writer.renderer, _with_results(shown, given), tools, last, calls)
        steps.append(_WrittenTurn(prompt=prompt, answer=answer, is_trained=each.is_trained))
        shown = []
        last = answer
        calls = answer.calls
        given = each.calls
    if shown:
        prompt = _prompt(writer.renderer, _with_results(shown, given), tools, last, calls)
        steps.append(_WrittenTurn(prompt=prompt, answer=None))
    return steps


def _asked(step: _WrittenTurn, writer: AnswerWriter) -> list[int]:
    """Return the prompt of an answer with the answer's own header."""
    return writer.with_header(step.prompt, step.answer.header) if step.answer else step.prompt


def _kept(step: _WrittenTurn, writer: AnswerWriter) -> list[int]:
    """Return the tokens of a past answer and its prompt, as they were sampled."""
    assert step.answer is not None
    return [*_asked(step, writer), *step.answer.sampled]


def _forgotten(step: _WrittenTurn, writer: AnswerWriter) -> list[int]:
    """Return the tokens of a past answer and its prompt without the thoughts."""
    assert step.answer is not None
    shown, answer = writer.without_thoughts(step.prompt, step.answer)
    return [*shown, *answer]


def _with_results(shown: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages after an answer, whose first ones are the results of its calls in order.

    Raises: ValueError: a result has the id of no call.
    """
    others = (i for i, each in enumerate(shown) if each["role"] != "tool")
    num = next(others, len(shown))
    return [*in_order(shown[:num], calls), *shown[num:]]


def _prompt(
    renderer: Renderer,
    shown: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    last: WrittenAnswer | None,
    calls: list[dict[str, Any]],
) -> list[int]:
    """Return the tokens from the last answer, or from the beginning, to the next answer."""
    if not shown:
        raise ValueError("messages: the agent's message follows none of the environment")
    is_user = [each["role"] for each in shown] == ["user"]
    text = str(shown[0]["content"])
    if last is None:
        if is_user and not tools:
            return renderer.first_prompt(text)
        return renderer.of_messages(shown, tools=tools)
    end = last.sampled[-1]
    if is_user and not calls:
        return renderer.after_turn(text, is_stopped=True, end=end)
    has_calls = bool(calls) or shown[0]["role"] == "tool"
    how: dict[str, Any] = {"is_stopped": True, "has_calls": has_calls, "calls": calls, "end": end}
    return renderer.after_calls(shown, tools=tools, **how)


def _as_chat(message: Message) -> dict[str, Any]:
    """Return a message in the format of chat templates."""
    found: dict[str, Any] = {"role": message.chat_role, "content": message.text}
    if message.call_id:
        found[RESULT_ID] = message.call_id
    if message.thoughts:
        found[FIELDS[0]] = message.thoughts
    return {**found, "tool_calls": message.calls} if message.calls else found
