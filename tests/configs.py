"""Changing single keys of a frozen configuration."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

Section = TypeVar("Section")


def edited(section: Section, changes: Mapping[str, object]) -> Section:
    """Return a copy with other values.

    Args:
        section: a whole config, or any section of one.
        changes: by dotted key below `section`, such as {"groups.size": 8}.
    """
    changed: Any = section
    for key, value in changes.items():
        name, _, below = key.partition(".")
        value = edited(getattr(changed, name), {below: value}) if below else value
        changed = replace(changed, **{name: value})
    return changed
