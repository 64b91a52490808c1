"""How AgentGym's clients begin a conversation, character for character; the texts are data.

conversations.json holds of each dialect the instruction, the agent's canned answer to it, and how
the client words a first observation, where it adds to the server's.
"""

import json
from dataclasses import dataclass
from typing import Any

from envhub.env import Style
from envhub.tables import read_text

PLACE = "{observation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The first two messages, and the form of the third, with PLACE for the server's text."""

    instruction: str
    acknowledgement: str
    first: str = PLACE

    def first_observation(self, text: str) -> str:
        """Return the third message."""
        return self.first.replace(PLACE, text)

    def server_text(self, message: str) -> str:
        """Return the server's part of the third message."""
        before, _, after = self.first.partition(PLACE)
        return message.removeprefix(before).removesuffix(after)


CONVERSATIONS = {
    name: Conversation(**texts)
    for name, texts in json.loads(read_text(__file__, "conversations.json")).items()
}


def begun(name: str, instruction: dict[Style, str]) -> dict[str, Any]:
    """Return the fields of an `EnvSpec` with which its conversations begin as AgentGym's do.

    Args:
        name: an environment's; one that AgentGym does not have keeps its instruction.
    """
    told = CONVERSATIONS.get(name)
    if told is None:
        return {"instruction": instruction}
    return {
        "instruction": {**instruction, Style.AGENTGYM: told.instruction},
        "acknowledgement": {Style.AGENTGYM: told.acknowledgement},
    }
