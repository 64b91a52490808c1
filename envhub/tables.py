"""Loading of tables and texts stored beside the module that uses them."""

from pathlib import Path
from typing import Any

import yaml

from envhub.env import Style


def read_table(code: str, name: str) -> Any:
    """Return the content of a YAML file beside a module; `code` is the module's `__file__`."""
    return yaml.load(read_text(code, name), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_text(code: str, name: str) -> str:
    """Return the content of a text file beside a module."""
    return (Path(code).parent / name).read_text(encoding="utf-8")


def read_instructions(code: str) -> dict[Style, str]:
    """Return the instruction of each style: `<style>.txt` beside a module, "" without such a file.

    A backslash at the end of a line joins it to the next line. The file's last line break is
    removed.
    """
    return {
        style: read_text(code, f"{style}.txt").replace("\\\n", "").removesuffix("\n")
        if Path(code).with_name(f"{style}.txt").is_file()
        else ""
        for style in Style
    }


def one_instruction(text: str) -> dict[Style, str]:
    """Return the instructions of an environment that has only that of `instructed`."""
    return {style: text if style is Style.INSTRUCTED else "" for style in Style}
