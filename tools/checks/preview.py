"""A conversation as the policy receives it, for `--dry-run` and `doctor`."""

from actor.formats.call_turn import CallTurn
from actor.formats.checks import renderer_of
from actor.formats.renderer import Renderer
from actor.formats.tools import tool_of
from common.config.actor import AgentFormat
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.chat_template import fix_prompts
from common.formats.turns import Message
from common.repository import ROOT

ENV = "maze"
PAGE = "You see a door."
ACTION = "open the door"
RESULT = "The door is open."


def preview_lines(cfg: RunConfig) -> list[str]:
    """Return two turns of a conversation with special tokens, and what ends a turn.

    Without a tokenizer at `model.path`, the result is []. For a chat template that cannot be used,
    it is the reason.
    """
    folder = ROOT / cfg.model.path
    if not (folder / "tokenizer.json").is_file():
        return []
    try:
        fix_prompts(cfg.model)
        renderer = renderer_of(folder, AgentFormat.PLAIN)
    except ConfigError as error:
        return [f"prompts: {error}"]
    return [*_conversation(renderer), *_marks(renderer)]


def _conversation(renderer: Renderer) -> list[str]:
    """Return the lines that show two turns of a conversation."""
    called = renderer.call_turn
    user: Message = {"role": "user", "content": PAGE}
    if isinstance(called, CallTurn):
        call = called.call(ENV, {"action": ACTION})
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: Message = {"role": "tool", "name": ENV, "content": RESULT}
        ids = renderer.of_messages([user, answer, result], tools=[tool_of(ENV)])
        head = "prompts: two turns with a tool call, as the policy receives them:"
        return [head, *_indented_lines(renderer, ids)]
    ids = renderer.conversation([PAGE, ACTION, RESULT])
    return [
        f"prompts: two turns, as the policy receives them; without a tool call: {called}:",
        *_indented_lines(renderer, ids),
    ]


def _indented_lines(renderer: Renderer, ids: list[int]) -> list[str]:
    """Return decoded tokens as indented lines."""
    return [f"  | {line}" for line in renderer.shown(ids).split("\n")]


def _marks(renderer: Renderer) -> list[str]:
    """Return the lines about the ends of turns and about thoughts."""
    ends = " ".join(renderer.shown([each]) for each in renderer.end_of_turn_ids)
    thoughts = renderer.thoughts.described()
    return [f"prompts: a turn ends with {ends}", f"prompts: thoughts are {thoughts}"]
