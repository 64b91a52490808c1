"""Laws of a run's keys."""

import stat
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.wire.security import create_keys, load_keys


def test_keys_are_made_once_and_read_by_others(tmp_path: Path) -> None:
    made = create_keys(tmp_path / "keys")
    assert create_keys(tmp_path / "keys") == made
    assert load_keys(tmp_path / "keys") == made
    assert made.server_public != made.client_public
    assert create_keys(tmp_path / "other") != made


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    files = list((tmp_path / "keys").iterdir())
    assert len(files) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    create_keys(tmp_path)
    (tmp_path / "client_secret").unlink()
    with pytest.raises(ConfigError, match="client_secret"):
        load_keys(tmp_path)
