"""Laws of the files that travel to a joining node."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.join import files
from common.join.files import check_bounds, is_intact, is_shareable, list_shared, manifest_digest
from common.wire.messages import SharedFile


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"a": 1}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    (folder / "code.py").write_text("raise SystemExit", encoding="utf-8")
    (folder / ".hidden.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "name",
    ["../config.json", "a/config.json", "/etc/passwd.txt", "..", "", ".x.json", "a\0.json", "a.py"],
)
def test_nested_or_unknown_file_is_refused(name: str) -> None:
    assert not is_shareable(name)
    with pytest.raises(ConfigError, match="a joining node receives only"):
        check_bounds([SharedFile(name=name, num_bytes=1, sha256="")])


def test_join_transfers_config_and_tokenizer_not_weights(tmp_path: Path) -> None:
    shared = list_shared(write_model(tmp_path / "model"))
    assert [each.name for each in shared] == ["config.json", "tokenizer.json"]
    assert all(is_intact(tmp_path / "model" / each.name, each) for each in shared)


def test_oversized_transfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def file(name: str, num_bytes: int) -> SharedFile:
        return SharedFile(name=name, num_bytes=num_bytes, sha256="")

    monkeypatch.setattr(files, "MAX_TOTAL_BYTES", 10)
    check_bounds([file("a.json", 5), file("b.json", 5)])
    for wrong in ([file("a.json", 6), file("b.json", 5)], [file("a.json", 1)] * 2):
        with pytest.raises(ConfigError, match="a joining node receives at most"):
            check_bounds(wrong)
    with pytest.raises(ConfigError, match="a joining node receives only"):
        check_bounds([file("a.json", -1)])


def test_changed_file_changes_digest_and_fails_check(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    before = list_shared(folder)
    (folder / "tokenizer.json").write_text('{"a": 2}', encoding="utf-8")
    after = list_shared(folder)
    assert manifest_digest(before) != manifest_digest(after)
    assert not is_intact(folder / "tokenizer.json", before[1])


def test_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        list_shared(tmp_path)


def test_template_of_the_run_replaces_that_of_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}", encoding="utf-8")
    for text in ("", "{{ bos_token }}"):
        if text:
            (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
        shared = {each.name: each for each in list_shared(folder, template=own)}
        assert sorted(shared) == ["chat_template.jinja", "config.json", "tokenizer.json"]
        assert is_intact(own, shared["chat_template.jinja"])
