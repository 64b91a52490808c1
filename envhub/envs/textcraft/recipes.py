"""Our own recipes, of the table `recipes.yaml`."""

from envhub.tables import read_table

_TABLE = read_table(__file__, "recipes.yaml")
TAGS: dict[str, tuple[str, ...]] = {tag: tuple(members) for tag, members in _TABLE["tags"].items()}


def recipe_lines() -> list[str]:
    """Return every recipe of the table as one line."""
    lines: list[str] = _TABLE["recipes"].splitlines()
    for family in _TABLE["families"]:
        columns = family["over"]
        for values in zip(*columns.values(), strict=True):
            text = family["recipes"].format(**dict(zip(columns, values, strict=True)))
            lines += text.splitlines()
    return lines
