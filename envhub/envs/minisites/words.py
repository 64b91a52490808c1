"""Invented words that the sites' data are made of."""


def listed(text: str) -> tuple[str, ...]:
    """Returns the words of a text."""
    return tuple(text.split())


FIRST_NAMES = listed(
    "Ada Amir Anouk Bela Bruno Carmen Cleo Dario Dina Edgar Elif Emil Farah Felix Greta Hana Hugo "
    "Ines Ivo Jade Jonas Kaia Kofi Lena Luca Mabel Milo Nadia Niko Olive Otto Petra Rafi Rosa "
    "Selma Tariq Tilda Uma Viktor Wanda Yara Zeno"
)
LAST_NAMES = listed(
    "Abbott Alvarez Barlow Bergman Castell Dahl Delgado Ebner Ferrell Fontaine Garrow Haddad "
    "Hollis Ibsen Jansen Kessler Kovac Lindqvist Marlow Moreau Nakata Novak Okafor Paterson "
    "Quill Ramsey Rossi Sandoval Sterling Tamm Thorne Ueda Valdez Vance Wexler Yilmaz Zeller"
)
TOWNS = (
    ("Alder Falls", "OR"),
    ("Birchmont", "VT"),
    ("Cedar Point", "ME"),
    ("Dunmore", "PA"),
    ("Eastvale", "CA"),
    ("Fairhaven", "MA"),
    ("Glenrock", "WY"),
    ("Hartwell", "GA"),
    ("Ironwood", "MI"),
    ("Juniper", "NM"),
    ("Kingsley", "IA"),
    ("Larkspur", "CO"),
)
STREETS = listed(
    "Acorn Beacon Cherry Dogwood Elder Foundry Garden Harbor Ivy Juniper Kestrel Linden Maple "
    "Northgate Orchard Pearl Quarry River Spruce Tanner Union Valley Willow"
)
