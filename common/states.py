"""Fingerprints of states and actions of turns: equal numbers, equal states of one item."""

import hashlib


def state_number(text: str) -> int:
    """Return a hash of what an environment says of its state, or else of what the agent was told.

    32 bits: numbers are compared within a group only, where two of a hundred unequal states are
    alike once in a million groups.
    """
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def action_number(action: str) -> int:
    """Return a hash of an action as it is sent to the environment, without space around it.

    What the policy thought before it acted is no part of the action. "" is an answer without one.
    """
    return state_number(action.strip())
