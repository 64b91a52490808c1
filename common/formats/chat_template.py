"""The one place where chat templates are rendered, and the date that they name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

FILES = ("chat_template.jinja", "tokenizer_config.json")  # that may hold a chat template
DATE_STRING = "%d %b %Y"  # Llama's form of `date_string`
CLOCK, DATE = "strftime_now", "date_string"
# A template with a default of its own for `date_string` keeps it, as on every other server.
_HAS_DEFAULT = re.compile(rf"\b{DATE}\s+is\s+(not\s+)?defined|\b{DATE}\s*\|\s*(default|d)\b")


@dataclass(slots=True)
class _Process:
    """The date of this process: that of its run, else that of its first prompt."""

    date: str = ""  # YYYY-MM-DD


_process = _Process()


def today() -> str:
    """Return the date of this machine as YYYY-MM-DD."""
    return date.today().isoformat()


def fix_date(day: str) -> None:
    """Let all prompts of this process name the date of its run; "" changes nothing.

    Args:
        day: `model.date`.
    """
    _process.date = day or _process.date


def prompt_date() -> str:
    """Return the date that prompts of this process name. It never changes by the clock."""
    _process.date = _process.date or today()
    return _process.date


def names_date(folder: Path) -> bool:
    """Return whether the chat template in a model's folder may ask for the date."""
    texts = [
        path.read_text(encoding="utf-8") for name in FILES if (path := folder / name).is_file()
    ]
    return any(CLOCK in text or DATE in text for text in texts)


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    day: str = "",
) -> str:
    """Return the text of a conversation by the tokenizer's chat template.

    A template asks for the date by `strftime_now` or `date_string`. Every prompt of a run names the
    date of its start, at midnight: members of a group see the same text on two days.

    Args:
        day: YYYY-MM-DD; "": the date of this process.
    """
    return str(
        tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **_date_of(tokenizer, day or prompt_date()),
        )
    )


def _date_of(tokenizer: Any, day: str) -> dict[str, Any]:
    """Return what a template needs to name a date; nothing for one that names none."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    moment = datetime.fromisoformat(day)
    given: dict[str, Any] = {}
    if CLOCK in template:
        given[CLOCK] = moment.strftime
    if DATE in template and not _HAS_DEFAULT.search(template):
        given[DATE] = moment.strftime(DATE_STRING)
    return given
