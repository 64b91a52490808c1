"""A run on a machine with everything at once that has ended runs elsewhere."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.hard_machine import CORES, MEMORY_BYTES, NO_ONE, hard_machine
from tests.end_to_end.nodes import why_not

LIMIT_S = 1200.0
NEEDS = ("unshare", "setpriv", "ip")


def links() -> set[Path]:
    """Return the folders of short links that belong to the user without an entry."""
    found: set[Path] = set()
    for path in Path("/tmp").glob("ls????????"):
        with contextlib.suppress(FileNotFoundError):  # A link of a run that has just ended.
            if path.lstat().st_uid == NO_ONE:
                found.add(path)
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user: needs root")
@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason="needs unshare, setpriv and ip")
def test_run_succeeds_on_a_minimal_machine() -> None:
    if reason := why_not():
        pytest.skip(reason)
    before = links()
    with hard_machine() as machine:
        done = machine.run(
            *("--config", "smoke", f"run.dir={machine.runs}", "log.wandb=auto"),
            timeout_s=LIMIT_S,
            WANDB_MODE="dryrun",
            WANDB_API_KEY=40 * "x",  # With an account, only the variable keeps it offline.
        )
        said = machine.log.read_text(encoding="utf-8", errors="replace")
        assert done.returncode == 0, said[-5000:]
        folder = machine.runs / "smoke"
        assert json.loads((folder / "finished.json").read_bytes())["version"] == 3
        assert "role ended" not in said
        assert list(folder.glob("wandb/offline-run-*/*.wandb"))
        assert "wandb failed" not in (folder / "logs" / "learner.log").read_text(encoding="utf-8")
        assert {path.stat().st_mode & 0o777 for path in folder.glob("keys/*_secret")} == {0o600}
        assert (folder / "keys").stat().st_mode & 0o777 == 0o700
        used = json.loads((folder / "cpu.json").read_bytes())
        assert used["cores"] <= (CORES if machine.groups else os.cpu_count() or 1)
        doctor = machine.run("doctor", "--quick", timeout_s=120)
        assert doctor.returncode in (0, 1)
        said = machine.log.read_text(encoding="utf-8", errors="replace")
        has_limit = f"of {MEMORY_BYTES / 2**30:.1f}" in said
        assert has_limit or not machine.groups, said[-3000:]
        assert links() == before
