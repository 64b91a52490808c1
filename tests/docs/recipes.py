"""The rows of docs/RECIPES.md: a command for each kind of thing that a reader has."""

import re
import shlex
from dataclasses import dataclass

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.repository import ROOT
from tools.checks.hub_models import resolve_models
from tools.cli.command_line import ParsedCommand, parse
from tools.cli.requested import DEFAULT_CONFIG

PAGE = ROOT / "docs" / "RECIPES.md"
ROW = re.compile(
    r"^\| (?P<have>[^|]+) \| `(?P<command>python run\.py[^|`]*)`"
    r" \| (?P<memory>[^|]+) \| (?P<rate>[^|]+) \|$",
    re.MULTILINE,
)
FOLDER = "model.path=FOLDER"  # Stands for the reader's own model.
POLICY = "model.path=configs/policies/tiny"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the page."""

    have: str
    command: str
    memory: str
    rate: str

    @property
    def request(self) -> ParsedCommand:
        """The parsed command, with a policy of the project in place of the reader's model."""
        return parse(shlex.split(self.command.replace(FOLDER, POLICY))[2:])

    @property
    def configuration(self) -> RunConfig:
        """The configuration; a model that is not on this machine has its preset's sizes."""
        request = self.request
        named = request.config or DEFAULT_CONFIG
        cfg = load_config(named, request.overrides, is_dry=True)
        return resolve_models(cfg, is_dry=True, may_stand_in=True)

    def __str__(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.have.partition(" ([")[0].lower())


RECIPES = [Recipe(**found.groupdict()) for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
