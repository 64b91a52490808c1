"""The renderer of episodes: the text around turns, and the room that a page needs."""

from collections.abc import Sequence
from typing import Any

from actor.formats.chat_renderer import ChatRenderer
from actor.formats.measured import with_ids
from actor.rollout.context import least_prompt
from actor.rollout.folding import least_of_branches
from common.config.actor import ActorSection
from common.errors import ConfigError
from common.formats.turns import ASSISTANT, NEXT, USER, Message

__all__ = ["ASSISTANT", "NEXT", "USER", "Message", "Renderer", "with_ids"]


class Renderer(ChatRenderer):
    """Encodes the observations of episodes for one tokenizer."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the policy."""
        return self._tokenizer

    def of(self, env: str, tools: Sequence[Message] = ()) -> "Renderer":
        """Return the renderer of an environment's episodes, whose actions may call `tools`."""
        return self

    def without_tools(self) -> "Renderer":
        """Return the renderer of conversations without tools."""
        return self

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
