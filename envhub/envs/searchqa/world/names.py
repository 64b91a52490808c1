"""Invented names for the generated world; none is taken twice."""

import random

from envhub.tables import read_table

WORDS = {key: tuple(text.split()) for key, text in read_table(__file__, "words.yaml").items()}


class Names:
    """Draws names; the order of draws and the generator decide them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: dict[str, None] = {}

    def word(self) -> str:
        """Return an invented word of two or three syllables, such as "Brandelk"."""
        rng = self._rng
        while True:
            middle = "".join(
                rng.choice(WORDS["vowels"]) + rng.choice(WORDS["middles"])
                for _ in range(rng.choice((1, 1, 2)))
            )
            name = (
                rng.choice(WORDS["onsets"]) + middle + rng.choice(WORDS["endings"])
            ).capitalize()
            if name not in self._taken:
                self._taken[name] = None
                return name

    def person(self, surname: str, *, is_woman: bool) -> str:
        """Return a first name with `surname`."""
        while True:
            name = f"{self._rng.choice(WORDS['women' if is_woman else 'men'])} {surname}"
            if name not in self._taken:
                self._taken[name] = None
                return name

    def title(self) -> str:
        """Return a title of a work, such as "The Silent Harbour of Brandelk"."""
        adjective, noun = self._rng.choice(WORDS["adjectives"]), self._rng.choice(WORDS["nouns"])
        form = self._rng.choice(
            ("The {a} {n} of {w}", "The {n} of {w}", "{a} {w}", "{w} and the {n}")
        )
        return form.format(a=adjective, n=noun, w=self.word())
