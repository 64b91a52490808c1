"""Laws of the date in prompts: one for a run, whatever the wall clock."""

import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as theirs
from jinja2.exceptions import SecurityError

from actor.formats.renderer import Renderer
from common.errors import ConfigError
from common.formats import chat_template
from common.formats.chat_template import fix_date, names_date, prompt_date, render_chat
from common.repository import ROOT
from tests.actor.formats.test_renderer import make_chatml
from tools.exchange.agent_traj import Conversation, Message
from tools.exchange.writing import Framing
from tools.offline.rows import row_of_conversation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = {
    "clock": "{{ strftime_now('%d %b %Y') }}",
    "text": "{{ date_string }}",
    "llama": "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    "{% endif %}{{ date_string }}",
}
SAYS = [{"role": "user", "content": "You see a door."}]


def dated(asked: str) -> Any:
    """Return a tokenizer whose chat template names the date."""
    system = f"<|im_start|>system\nToday: {asked}<|im_end|>\n"
    return make_chatml(f"{{%- set first = 1 %}}{system}{CHATML}")


def set_clock(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    """Let the libraries' clocks, and ours, show a day of May 2026."""

    class Moment(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Moment":
            return cls(2026, 5, day, tzinfo=tz)

    class Day(datetime.date):
        @classmethod
        def today(cls) -> "Day":
            return cls(2026, 5, day)

    monkeypatch.setattr(theirs, "datetime", Moment)
    monkeypatch.setattr(chat_template, "date", Day)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_process_prompts_keep_one_date_across_days(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = dated(asked)
    texts: list[str] = []
    for day in (1, 2):
        set_clock(monkeypatch, day)
        texts.append(tokenizer.decode(Renderer(tokenizer).first_prompt("You see a door.")))
    assert texts[0] == texts[1]
    assert "Today: 01 May 2026" in texts[0]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_all_renderers_use_the_run_date(asked: str) -> None:
    fix_date("2024-02-29")
    tokenizer = dated(asked)
    ids = Renderer(tokenizer).first_prompt("You see a door.")
    assert "Today: 29 Feb 2024" in tokenizer.decode(ids)
    talk = [
        Message(text=text, is_agent=is_agent, is_trained=is_agent)
        for text, is_agent in (("You see a door.", False), ("go", True))
    ]
    row = row_of_conversation(tokenizer, Conversation(item_id="x", messages=talk))
    assert row.token_ids[: len(ids)].tolist() == ids


def test_export_uses_the_date_of_its_run() -> None:
    fix_date("2025-01-01")
    tokenizer = dated(ASKED["clock"])
    prompt = render_chat(tokenizer, SAYS, day="2024-02-29")
    assert "Today: 29 Feb 2024" in prompt
    framing = Framing(tokenizer, day="2024-02-29")
    assert framing._render(SAYS) == prompt


def test_run_date_replaces_the_process_date() -> None:
    assert prompt_date() == datetime.date.today().isoformat()
    fix_date("2024-02-29")
    fix_date("")
    assert prompt_date() == "2024-02-29"


def test_template_default_date_is_kept() -> None:
    own = dated("{{ date_string | default('26 Jul 2024') }}")
    assert "Today: 26 Jul 2024" in render_chat(own, SAYS)


def test_template_without_a_date_is_given_none() -> None:
    class Strict:
        """A tokenizer that takes no argument beyond its own, as some do."""

        chat_template = CHATML

        def apply_chat_template(
            self, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool
        ) -> str:
            return json.dumps([messages, tools, tokenize, add_generation_prompt])

    assert json.loads(render_chat(Strict(), SAYS)) == [SAYS, None, False, True]


def test_template_that_names_a_date_is_recognised(tmp_path: Path) -> None:
    assert not names_date(ROOT / "configs" / "policies" / "tiny")
    (tmp_path / "chat_template.jinja").write_text(ASKED["llama"], encoding="utf-8")
    assert names_date(tmp_path)


ENDLESS = "{% set all = range(9999) %}" + "{% for a in all %}" * 9 + "{% endfor %}" * 9


def test_endless_template_is_ended_and_named() -> None:
    tokenizer = dated(ENDLESS)
    for _ in range(2):  # It is not tried again.
        with pytest.raises(
            ConfigError, match=r"computes for more than 0\.1 s.*model\.chat_template"
        ):
            render_chat(tokenizer, SAYS, limit_s=0.1)
    assert "Today: hello" in render_chat(dated("hello"), SAYS, limit_s=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 10_000_000_000 }}",
        "{{ 10_000_000_000 * [1] }}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_single_operation_of_a_template_is_bounded(text: str) -> None:
    with pytest.raises(SecurityError, match="chat template"):
        render_chat(dated(text), SAYS)


def test_small_products_and_powers_of_a_template_are_rendered() -> None:
    assert "aaa 6 8 0.25" in render_chat(
        dated("{{ 'a' * 3 }} {{ 2 * 3 }} {{ 2 ** 3 }} {{ 2 ** -2 }}"), SAYS
    )


def test_endless_template_ends_in_each_thread() -> None:
    tokenizers = [dated(f"{ENDLESS}{number}") for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(render_chat, each, SAYS, limit_s=0.1) for each in tokenizers]
        assert all(isinstance(each.exception(60), ConfigError) for each in asked)
        assert pool.submit(lambda: sum(range(1_000_000))).result(60) > 0
