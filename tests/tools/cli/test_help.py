"""Laws of the help: every key, section and command is explained from its declaration."""

import pytest

from common.config.keys import field_kinds, list_keys
from common.errors import ConfigError
from tools.cli.command_line import all_commands, command_help
from tools.cli.help import AllKeys, help_text


def test_every_key_has_its_help() -> None:
    keys = list_keys(AllKeys)
    assert len(keys) > 400
    for key in keys:
        head = f"{command_help(key)}\n" if key in all_commands() else ""
        own = help_text([key]).removeprefix(head)
        assert own.startswith(f"{key}=")


SECTIONS = sorted(field_kinds(AllKeys).keys() - {"launcher", "dashboard"})


def test_key_help_shows_type_default_and_constraint() -> None:
    assert help_text(["learner.lr"]) == (
        "learner.lr=1e-06\n  a number; must be in (0, 10]\n  Sets the learning rate of AdamW.\n"
        "  Live: `set` changes it during a run.\n"
    )


def test_choice_help_explains_every_option() -> None:
    text = help_text(["train.mode"])
    assert "one of async, sync" in text
    assert "learner trains on it and publishes its weights" in " ".join(text.split())


@pytest.mark.parametrize("section", SECTIONS)
def test_section_help_lists_its_keys(section: str) -> None:
    keys = [key for key in list_keys(AllKeys) if key.startswith((f"{section}.", f"{section}["))]
    own = [key for key in keys if key.count(".") == 1]
    assert own
    assert [key for key in own if f"  {key}=" not in help_text([section])] == []


def test_bare_help_lists_the_sections() -> None:
    assert [name for name in field_kinds(AllKeys) if f"  {name}" not in help_text([])] == []


def test_unknown_key_help_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"help learner\.lrr: .*nearest is learner\.lr$"):
        help_text(["learner.lrr"])


@pytest.mark.parametrize("name", all_commands())
def test_command_help_names_existing_sections(name: str) -> None:
    assert set(all_commands()[name].sections.split()) <= set(field_kinds(AllKeys))
    assert command_help(name).startswith(f"usage: run.py {name} ")
    assert help_text([name]).startswith(command_help(name))
