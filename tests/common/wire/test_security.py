"""Laws of a run's keys."""

import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.wire.access.identities import NODE, PEERS, Identity, add_identity, revoke
from common.wire.messages import FileRequest, Heartbeat, JoinRequest
from common.wire.security import create_keys, load_keys, own_keys


def test_keys_are_created_once_and_loadable(tmp_path: Path) -> None:
    made = create_keys(tmp_path / "keys")
    assert create_keys(tmp_path / "keys") == made
    assert load_keys(tmp_path / "keys") == made
    assert made.server_public != made.client_public
    assert create_keys(tmp_path / "other") != made


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_keys_are_readable_by_their_owner_only(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        create_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    files = list((tmp_path / "keys").iterdir())
    assert len(files) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_missing_key_is_named(tmp_path: Path) -> None:
    create_keys(tmp_path)
    (tmp_path / "client_secret").unlink()
    with pytest.raises(ConfigError, match="client_secret"):
        load_keys(tmp_path)


def test_named_key_allows_only_its_own_name() -> None:
    actor, hub = Identity("actor-3", "actor", "p"), Identity("hub-1", "envhub", "q")
    asks = JoinRequest(role="actor", product="1", name="actor-3", public_key="p")
    assert actor.why_not(asks) == ""
    assert actor.why_not(FileRequest(name="config.json", offset_bytes=0)) == ""
    assert "messages under another name" in actor.why_not(replace(asks, name="actor-4"))
    assert "is for the role actor" in actor.why_not(replace(asks, role="envhub"))
    assert hub.why_not(replace(asks, name="hub-1", role="envhub")) == ""
    assert Identity(NODE, NODE, "n").why_not(asks) == ""  # the key that is for asking


def test_key_of_a_process_is_valid_for_its_engines_only() -> None:
    actor, hub = Identity("actor-3", "actor", "p"), Identity("hub-1", "envhub", "q")
    beat = Heartbeat(role="actor", name="actor-3~1", version=0, running=[])
    assert actor.why_not(beat) == ""
    for other in ("actor-4~1", "actor-3~x", "actor-3~0", "actor-3~1~2", "actor-33", "actor-3~"):
        assert "messages under another name" in actor.why_not(replace(beat, name=other))
    assert hub.why_not(JoinRequest(role="envhub", product="1", name="hub-1~1", public_key="q"))


def test_names_of_engines_are_issued_no_keys(tmp_path: Path) -> None:
    create_keys(tmp_path)
    own_keys(tmp_path, role="actor", name="actor-3")
    with pytest.raises(ConfigError, match="the name is not allowed"):
        own_keys(tmp_path, role="actor", name="actor-3~1")


def test_peer_file_keeps_one_line_per_name(tmp_path: Path) -> None:
    keys = create_keys(tmp_path)
    along = keys.known()
    own_keys(tmp_path, role="actor", name="gone")
    revoke(tmp_path, "gone")
    for _ in range(1_000):
        public = Identity("actor-0", "actor", secrets.token_hex(20))
        add_identity(tmp_path, public)
    last = own_keys(tmp_path, role="actor", name="actor-0")
    assert (tmp_path / PEERS).stat().st_size < 60_000
    for known in (along, keys.known()):  # Also an instance that read it from the start.
        known.refresh()
        found = known.find(last.client_public)
        assert found is not None
        assert (found.name, found.is_revoked) == ("actor-0", False)
        assert known.find(public.public) is None
        assert known.named("gone") is not None
        assert known.named("gone").is_revoked  # pyright: ignore[reportOptionalMemberAccess]
    assert stat.S_IMODE((tmp_path / PEERS).stat().st_mode) == 0o600
