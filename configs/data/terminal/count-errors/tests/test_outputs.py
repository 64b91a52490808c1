"""Tests of the task; `test.sh` runs them without a test framework."""

from pathlib import Path

EXPECTED = {"errors": 95}


def test_file_has_the_number() -> None:
    assert Path("/app/errors.txt").read_text().split() == [str(EXPECTED["errors"])]


def test_log_is_unchanged() -> None:
    assert len(Path("/app/server.log").read_text().splitlines()) == 400


if __name__ == "__main__":
    test_file_has_the_number()
    test_log_is_unchanged()
