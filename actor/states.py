"""Fingerprints of the states and actions of turns. Equal states of an item hash equally."""

import hashlib


def state_number(text: str) -> int:
    """Return a hash of the environment's state text, or of the observation if there is none.

    It has 32 bits. Hashes are compared only within a group: among a hundred different states, two
    collide in one of a million groups.
    """
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def action_number(action: str) -> int:
    """Return a hash of an action as it is sent to the environment, without surrounding space.

    The policy's reasoning before the action is not included. "" means an answer without an action.
    """
    return state_number(action.strip())
