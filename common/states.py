"""Fingerprints of the states that turns are taken in: equal numbers, equal states of one item."""

import hashlib


def state_number(text: str) -> int:
    """Return a hash of what an environment says of its state, or else of what the agent was told.

    32 bits: numbers are compared within a group only, where two of a hundred unequal states are
    alike once in a million groups.
    """
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)
