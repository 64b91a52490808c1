"""Law of a role's libraries: a failed import is a wrong installation. No restart can mend it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.load import load_config
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.security import create_keys


@pytest.mark.slow
def test_failed_import_of_a_role_ends_with_code_2(tmp_path: Path) -> None:
    package = tmp_path / "broken" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('the kernels are missing')\n", encoding="utf-8"
    )
    run_dir = RunDir(root=tmp_path / "runs" / "r")
    overrides = [f"run.dir={tmp_path / 'runs'}", "run.name=r"]
    save_config(load_config("smoke", overrides), run_dir.config)
    create_keys(run_dir.keys)
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "actor", *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "broken")},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ImportError: the kernels are missing")
