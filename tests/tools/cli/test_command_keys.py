"""Laws of keys that belong to commands, and of keys of the release before."""

import logging
from pathlib import Path

import pytest
import yaml

from common.config.keys import commands_of, list_keys
from common.config.load import config_as_yaml, load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from tools.cli.command_line import all_commands
from tools.cli.help import AllKeys
from tools.cli.requested import check_keys_of_others
from tools.evaluate.config import EvalConfig
from tools.offline.config import SftConfig

MODEL = "model.path=/weights"
OLDER = """
model: {path: /weights}
actor: {top_p: 1.0, top_k: -1, num_actors: 2}
log: {otlp_every_s: 30.0}
eval: {k: 3, items: paper, num_items: 7}
sft: {lr: 0.5}
policy: {temperature: 0.5}
study: {size: 2}
"""


def test_help_has_the_keys_of_all_commands() -> None:
    of_commands = {key for command in all_commands().values() for key in list_keys(command.schema)}
    assert {*list_keys(AllKeys)} == {*list_keys(RunConfig)} | of_commands


def test_table_names_the_commands_of_each_key() -> None:
    owned = {*list_keys(AllKeys)} - {*list_keys(RunConfig)}
    assert len(owned) > 90
    for key in owned:
        commands = [n for n, command in all_commands().items() if key in list_keys(command.schema)]
        assert commands_of(key, RunConfig) == " and ".join(commands), key
    assert [key for key in list_keys(RunConfig) if commands_of(key, RunConfig)] == []


def test_configuration_of_a_run_has_no_keys_of_commands() -> None:
    tree = yaml.safe_load(config_as_yaml(load_config("tiny", [MODEL])))
    assert not {"sft", "dpo", "evolve", "policy", "simulator", "study"} & tree.keys()
    assert "k" not in tree["eval"]
    assert load_config("tiny", [MODEL], schema=SftConfig).sft.num_demonstrations == 24000


def test_other_commands_key_on_the_command_line_gives_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        cfg = load_config(None, [MODEL, "sft.lr=0.123", "eval.num_items=7"])
    assert cfg.eval.num_items == 7
    assert caplog.messages == [
        "sft.lr=0.123: it is a key of sft and evolve, and this command does not read it"
    ]


def test_configuration_of_an_older_version_loads_without_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OLDER, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        cfg = load_config(str(path), [])
        of_eval = load_config(str(path), [], schema=EvalConfig)
    assert (cfg.actor.num_actors, cfg.eval.num_items) == (2, 7)
    assert (of_eval.eval.k, of_eval.policy.temperature) == (3, 0.5)
    assert caplog.messages == []


def test_removed_key_is_accepted_with_its_only_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(None, [MODEL, "actor.top_k=-1", "log.otlp_every_s=12"])
    assert caplog.messages == [
        "actor.top_k=-1: this key has no effect and will go; remove it",
        "log.otlp_every_s=12: this key has no effect and will go; remove it",
    ]
    with pytest.raises(ConfigError, match=r"^actor\.top_p=0\.9: must be in \[1, 1\]$"):
        load_config(None, [MODEL, "actor.top_p=0.9"])


@pytest.mark.parametrize("override", ["sft.lrr=1", "policy.urls=x", "study.nothing=1"])
def test_misspelled_key_of_another_command_is_refused(override: str) -> None:
    check_keys_of_others(["sft.lr=1", "eval.k=2", "learner.lr=1"], RunConfig)
    with pytest.raises(ConfigError, match="no such key"):
        check_keys_of_others([override], RunConfig)


def test_renamed_key_sets_its_new_name_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "older.yaml"
    path.write_text("defaults: smoke\nenvhub: {session_lease_s: 777.0}\n", encoding="utf-8")
    with caplog.at_level("WARNING"):
        cfg = load_config(str(path), ["envhub.agentgym_lease_s=9"])
    assert (cfg.envhub.session_idle_s, cfg.envhub.agentgym_idle_s) == (777.0, 9.0)
    assert "envhub.session_lease_s=777.0: this key has a new name" in caplog.text
    assert "envhub.agentgym_lease_s=9: this key has a new name" in caplog.text
    with pytest.raises(ConfigError, match=r"envhub\.session_idle_s is given twice"):
        load_config("smoke", ["envhub.session_lease_s=700", "envhub.session_idle_s=800"])


def test_stored_config_with_a_renamed_key_needs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = tmp_path / "config.yaml"
    text = config_as_yaml(load_config("smoke", []))
    stored.write_text(
        text.replace("session_idle_s: 600.0", "session_lease_s: 777.0"), encoding="utf-8"
    )
    with caplog.at_level("WARNING"):
        cfg = load_config(str(stored), [])
    assert cfg.envhub.session_idle_s == 777.0
    assert "new name" not in caplog.text
