"""The opening messages of AgentGym's clients, character for character.

`conversations.json` holds three texts for each dialect: the instruction, the agent's canned answer
to it, and the template of the first observation where the client extends the server's text.
"""

import json
from dataclasses import dataclass
from typing import Any

from envhub.env import Style
from envhub.tables import read_text

PLACE = "{observation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTemplate:
    """The first two messages and the template of the third; PLACE marks the server's text."""

    instruction: str
    acknowledgement: str
    first: str = PLACE

    def first_observation(self, text: str) -> str:
        """Return the third message, which holds the first observation."""
        return self.first.replace(PLACE, text)

    def server_text(self, message: str) -> str:
        """Return the server's part of the third message."""
        before, _, after = self.first.partition(PLACE)
        return message.removeprefix(before).removesuffix(after)


CONVERSATIONS = {
    name: ConversationTemplate(**texts)
    for name, texts in json.loads(read_text(__file__, "conversations.json")).items()
}


def begun(name: str, instruction: dict[Style, str]) -> dict[str, Any]:
    """Return the `EnvSpec` fields for conversations that begin as AgentGym's do.

    Args:
        name: an environment's name. An environment that AgentGym lacks keeps its own instruction.
    """
    conversation = CONVERSATIONS.get(name)
    if conversation is None:
        return {"instruction": instruction}
    return {
        "instruction": {**instruction, Style.AGENTGYM: conversation.instruction},
        "acknowledgement": {Style.AGENTGYM: conversation.acknowledgement},
    }
