"""Laws of `.github`: its files keep GitHub's schemas, and their commands exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.repository import ROOT
from tests.venvs import python_with
from tools.cli.command_line import parse

GITHUB = ROOT / ".github"
SCHEMAS = {
    "vendor.github-workflows": sorted((GITHUB / "workflows").glob("*.yaml")),
    "vendor.github-issue-forms": sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yaml")),
}

TESTS = {"make test", "make test-long"}
IN_THE_IMAGE = {"chromium", "python3-dev"}  # The runner has Chrome, and Python with its headers.


def commands_of(path: Path) -> list[str]:
    """Return the commands of a workflow."""
    workflow: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("path", SCHEMAS["vendor.github-workflows"], ids=lambda path: path.stem)
def test_commands_of_workflows_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for command in commands_of(path):
        program, *words = command.partition("|")[0].split()
        if program == "sudo":
            continue
        if program == "make":
            assert words[0] in targets
        else:
            assert (program, words[0]) == (".venv/bin/python", "run.py")
            assert parse([word.replace('"$MINUTES"', "60") for word in words[1:]]).command


def test_workflows_with_tests_install_the_packages_of_the_system() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = set(" ".join(re.findall(r'missing="\$\$missing ([^"]+)"', makefile)).split())
    assert wanted >= IN_THE_IMAGE
    for path in SCHEMAS["vendor.github-workflows"]:
        commands = commands_of(path)
        if not TESTS & set(commands):
            continue
        before = commands[: min(commands.index(each) for each in TESTS & set(commands))]
        installed = {word for line in before if "apt-get install" in line for word in line.split()}
        assert wanted - IN_THE_IMAGE <= installed, path.name
        assert "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in before


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_keep_the_schema_of_github(schema: str) -> None:
    python = python_with("check-jsonschema")
    command = [python, "-m", "check_jsonschema", "--builtin-schema", schema, *SCHEMAS[schema]]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
