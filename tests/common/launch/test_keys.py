"""Laws of the keys of a run as its owner deals with them."""

import json
from functools import partial
from pathlib import Path

import pytest

from common.config.command_line import ParsedCommand
from common.config.requested import load_joined
from common.config.run_config import ModelSection, RunConfig, RunSection
from common.errors import ConfigError
from common.launch.keys import refused_lines, revoke_key
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.access.identities import Identities
from common.wire.security import create_keys, own_keys


def ask(*words: str) -> ParsedCommand:
    return ParsedCommand(
        command="revoke", config=None, overrides=[*words], is_dry=False, suite=None, json=None
    )


def test_key_is_revoked_by_its_exact_name(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "runs" / "a")
    create_keys(run_dir.keys)
    keys = own_keys(run_dir.keys, role="actor", name="actor-3")
    save_config(RunConfig(run=RunSection(name="a"), model=ModelSection(path="m")), run_dir.config)
    load = partial(load_joined, root=tmp_path)
    assert revoke_key(ask("run.name=a", "actor-3"), root=tmp_path, load=load, say=print) == 0
    known = Identities(run_dir.keys)
    known.refresh()
    found = known.find(keys.client_public)
    assert found is not None
    assert found.is_revoked
    with pytest.raises(ConfigError, match=r"nobody: no key in .* has this name.*actor-3"):
        revoke_key(ask("run.name=a", "nobody"), root=tmp_path, load=load, say=print)
    with pytest.raises(ConfigError, match="give one name"):
        revoke_key(ask("run.name=a"), root=tmp_path, load=load, say=print)


def test_status_lists_refusals_per_peer_briefly(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    assert refused_lines(run_dir) == []
    peer = {"invalid": 3, "forbidden": 2, "dropped": 1, "unsent": 0, "last_reason": "x" * 10_000}
    connections = {"open": 1, "accepted": 9, "refused": {"too many": 7}, "refused_by_address": {}}
    told = {
        "scheduler": {"peers": {"actor-3\n": peer}, "connections": connections},
        "learner": {"weights/actor-3/invalid": 4},
        "hubs": {"envhub/127.0.0.1/token": 2},
    }
    run_dir.status.write_text(json.dumps({"refused": told}), encoding="utf-8")
    lines = refused_lines(run_dir)
    assert len(lines) == 4
    assert "envhub/127.0.0.1/token" in lines[3]
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    assert "3 invalid, 2 forbidden, 1 unread" in lines[0]


@pytest.mark.parametrize("gone", ["client_secret", "server_public", "hub_token"])
def test_missing_key_never_replaces_existing_keys(tmp_path: Path, gone: str) -> None:
    create_keys(tmp_path)
    (tmp_path / gone).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=gone):
        create_keys(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
