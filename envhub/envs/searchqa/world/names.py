"""Invented names for the generated world; none is taken twice."""

import random


def words(text: str) -> tuple[str, ...]:
    """Returns the words of a text."""
    return tuple(text.split())


ONSETS = words("b br c d dr f fl g gr h j k kl l m n p pr qu r s sk st t th tr v w z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "au", "ei")
MIDDLES = ("l", "m", "n", "r", "rd", "lv", "nd", "rm", "st", "v", "z", "k", "mb", "lt")
# Endings that English stemming leaves alone, so that different names stay different words.
ENDINGS = ("ok", "um", "ax", "orn", "elk", "ovo", "undo", "ith", "ark", "ulf", "imo", "ado", "unt")

WOMEN = words(
    "Ada Anka Astrid Berta Cara Celia Cora Delia Edda Enid Erna Esme Fiona Flora Gerda Gilda Greta "
    "Hanna Hedda Helga Hilda Ida Ilse Ines Irma Judith Jutta Karin Klara Leah Lidia Lorna Lucia "
    "Magda Marta Mina Mira Nadia Nora Odette Olga Paula Petra Pia Ramona Rhea Rosa Ruth Sabina "
    "Selma Stella Tamara Tessa Tilda Ulla Vera Wanda Willa Xenia Yara Yvonne Zelda Zora"
)
MEN = words(
    "Alvin Amos Arno Basil Benno Bruno Clement Dario Doran Egon Elmo Emil Ezra Fabio Felix Franz "
    "Gideon Gustav Hector Henrik Hugo Igor Ivo Jonas Josef Kamil Karl Konrad Lars Leon Linus "
    "Lothar Ludwig Malik Marek Matteo Milan Moritz Nestor Nils Oscar Otto Quentin Ralf Rolf Rufus "
    "Samir Silas Sven Theo Tobias Urban Viktor Werner"
)
ADJECTIVES = words(
    "Amber Bitter Bright Broken Burning Crimson Distant Drowned Empty Faded Final Forgotten Frozen "
    "Gentle Gilded Golden Hidden Hollow Iron Ivory Lonely Lost Northern Pale Patient Quiet "
    "Restless Scarlet Secret Shattered Silent Silver Sleeping Southern Stolen Velvet Winter"
)
NOUNS = words(
    "Archive Bridge Candle Cathedral Clock Compass Corridor Crown Echo Feather Forest Garden Gate "
    "Harbour Horizon Island Key Lamp Lantern Letter Map Meadow Mirror Mountain Oath Orchard "
    "Portrait Promise River Road Shadow Ship Stair Storm Tower Valley Violin Voyage Window"
)


class Names:
    """Draws names; the order of draws and the generator decide them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: dict[str, None] = {}

    def word(self) -> str:
        """Returns an invented word of two or three syllables, such as "Brandelk"."""
        rng = self._rng
        while True:
            middle = "".join(
                rng.choice(VOWELS) + rng.choice(MIDDLES) for _ in range(rng.choice((1, 1, 2)))
            )
            name = (rng.choice(ONSETS) + middle + rng.choice(ENDINGS)).capitalize()
            if name not in self._taken:
                self._taken[name] = None
                return name

    def person(self, surname: str, *, is_woman: bool) -> str:
        """Returns a first name with `surname`."""
        while True:
            name = f"{self._rng.choice(WOMEN if is_woman else MEN)} {surname}"
            if name not in self._taken:
                self._taken[name] = None
                return name

    def title(self) -> str:
        """Returns a title of a work, such as "The Silent Harbour of Brandelk"."""
        adjective, noun = self._rng.choice(ADJECTIVES), self._rng.choice(NOUNS)
        form = self._rng.choice(
            ("The {a} {n} of {w}", "The {n} of {w}", "{a} {w}", "{w} and the {n}")
        )
        return form.format(a=adjective, n=noun, w=self.word())
