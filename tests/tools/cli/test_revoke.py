"""Laws of the keys of a run as its owner deals with them."""

from pathlib import Path

import pytest

from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.access.identities import Identities
from common.wire.security import create_keys, own_keys
from tools.cli import revoke
from tools.cli.command_line import ParsedCommand


def ask(*words: str) -> ParsedCommand:
    return ParsedCommand(
        command="revoke", config=None, overrides=[*words], is_dry=False, suite=None, json=None
    )


def test_key_is_revoked_by_its_exact_name(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "runs" / "a")
    create_keys(run_dir.keys)
    keys = own_keys(run_dir.keys, role="actor", name="actor-3")
    save_config(RunConfig(run=RunSection(name="a"), model=ModelSection(path="m")), run_dir.config)
    where = f"run.dir={tmp_path / 'runs'}"
    assert revoke.run(ask("run.name=a", where, "actor-3")) == 0
    known = Identities(run_dir.keys)
    known.refresh()
    found = known.find(keys.client_public)
    assert found is not None
    assert found.is_revoked
    with pytest.raises(ConfigError, match=r"nobody: no key in .* has this name.*actor-3"):
        revoke.run(ask("run.name=a", where, "nobody"))
    with pytest.raises(ConfigError, match="give one name"):
        revoke.run(ask("run.name=a", where))


@pytest.mark.parametrize("gone", ["client_secret", "server_public", "hub_token"])
def test_missing_key_never_replaces_existing_keys(tmp_path: Path, gone: str) -> None:
    create_keys(tmp_path)
    (tmp_path / gone).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=gone):
        create_keys(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
