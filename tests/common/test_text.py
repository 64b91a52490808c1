"""Laws of text that every encoding can carry, and of what logs show of it."""

import io
import logging

from common.log import FORMAT, PlainFormatter
from common.text import (
    counted,
    is_file_name,
    is_path_inside,
    json_bytes,
    known_hint,
    log_text,
    near_hint,
)


def test_noun_agrees_with_its_number() -> None:
    assert counted(1, "epoch") == "1 epoch"
    assert [counted(n, "epoch") for n in (0, 2)] == ["0 epochs", "2 epochs"]
    assert counted(1, "copy", "copies") == "1 copy"
    assert counted(3, "copy", "copies") == "3 copies"
    assert counted(1200, "group is", "groups are", form=",") == "1,200 groups are"
    assert counted(1.0, "core", form="g") == "1 core"


def test_paths_that_leave_their_folder_are_recognized() -> None:
    assert is_file_name("a..b")
    assert is_file_name(".metadata")
    assert not any(map(is_file_name, ("", ".", "..", "a/b", "/a", "a\0", "a\n")))
    assert is_path_inside("a/b.c")
    assert is_path_inside("a")
    assert not any(map(is_path_inside, ("", "/a", "../a", "a/../b", "a//b", "a/", "./a")))


def test_only_similar_names_are_suggested() -> None:
    assert near_hint("babyia", ["babyai", "code"]) == "; the nearest is 'babyai'"
    assert near_hint("BABYAI", ["babyai", "code"], form=str) == "; the nearest is babyai"
    assert near_hint("zzqx", ["babyai", "code"]) == ""
    assert known_hint("zzqx", ["babyai", "code"]) == "; there are 'babyai', 'code'"
    assert known_hint("zzqx", []) == ""
    many = [f"n{number}" for number in range(14)]
    assert known_hint("zzqx", many, form=str).endswith("n10, n11 and 2 more")


def test_control_characters_reach_no_log() -> None:
    assert log_text("a\x1b[2J\x9b\0\u202eb\tc\nd") == "a\\x1b[2J\\x9b\\x00\\u202eb\tc\nd"
    assert log_text("half \ud83d \u5b57 \u05e9") == "half \ufffd \u5b57 \u05e9"


def test_log_line_survives_any_text() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    handler = logging.StreamHandler(out)
    handler.setFormatter(PlainFormatter(FORMAT.format(role="actor-0")))
    record = logging.makeLogRecord({"msg": "action=%s", "args": ("\x1b[31m\ud800\r",)})
    handler.handle(record)
    out.flush()
    written = out.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]
    assert written.endswith("action=\\x1b[31m\ufffd\\r\n")


def test_json_keeps_letters_unescaped() -> None:
    assert json_bytes({"a": "\u5b57"}) == '{"a": "\u5b57"}'.encode()
