"""Laws of the roles' logs."""

from pathlib import Path

from common.host.child_process import read_tail
from common.log import rotate_logs


def test_oversized_log_is_rotated_under_its_writer(tmp_path: Path) -> None:
    path, small = tmp_path / "learner.log", tmp_path / "actor-0.log"
    small.write_text("few words", encoding="utf-8")
    with path.open("ab", buffering=0) as log:  # as a role's output is appended
        for life in ("first", "second"):
            log.write(f"{life}\n".encode() * 100)
            offset = path.stat().st_size
            rotate_logs(tmp_path, max_bytes=200)
            log.write(b"and on\n")
            assert path.read_text(encoding="utf-8") == "and on\n"
            assert read_tail(path, offset, max_lines=5) == ["and on"]
            older = (tmp_path / "learner.log.1").read_text(encoding="utf-8")
            assert older.endswith(f"{life}\n" * 100)
    assert small.read_text(encoding="utf-8") == "few words"
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"learner.log", "learner.log.1", "actor-0.log"}
