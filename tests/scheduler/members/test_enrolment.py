"""Laws of the configuration that joining roles receive."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from common.config.run_config import RunConfig
from common.repository import ROOT
from scheduler.members.enrolment import SECTIONS

# Folders and files of each role, without the commands that have the whole configuration.
CODE = {
    "actor": ("actor",),
    "envhub": ("envhub",),
    "learner": ("learner/node.py", "learner/node.py", "learner/training", "learner/policy"),
}
COMMANDS = ("actor/api/", "actor/seats/endpoint.py")


def files_of(role: str) -> Iterator[Path]:
    for name in CODE[role]:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if not file.relative_to(ROOT).as_posix().startswith(COMMANDS):
                yield file


@pytest.mark.parametrize("role", SECTIONS)
def test_joining_role_receives_each_section_that_it_reads(role: str) -> None:
    sections = {field.name for field in fields(RunConfig)}
    texts = [file.read_text(encoding="utf-8") for file in files_of(role)]
    read = {name for text in texts for name in re.findall(r"\bcfg\.([a-z_]+)\b", text)}
    assert read & sections
    assert read & sections - set(SECTIONS[role]) == set()
