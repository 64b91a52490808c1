"""Laws of files that grow at their end."""

import errno
import os
from pathlib import Path

import pytest

from common.store.disk import AppendFile


def test_append_whose_sync_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendFile(tmp_path / "log")
    file.append_synced([b"one\n"])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            file.append_synced([b"two\n"])
    assert (tmp_path / "log").read_bytes() == b"one\n"
    file.append_synced([b"three\n"])
    assert (tmp_path / "log").read_bytes() == b"one\nthree\n"
    file.close()
