"""Laws of any text as an action where packages of others play: MCP, TextArena, verifiers."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from common.repository import ROOT
from envhub.interop.yaml_environments import PACKAGES
from tests.envhub.any_text import check_texts, serving
from tests.envhub.interop import test_verifiers_tasksets as tasksets
from tests.envhub.interop.test_mcp_package import MCP, described
from tests.venvs import python_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # environments are made

CHECK = """
import asyncio, sys
from tests.envhub.any_text import check_texts, serving
with serving(sys.argv[1]) as url:
    asyncio.run(check_texts(url, sys.argv[2]))
"""


def check_apart(python: str, reference: str, env: str) -> None:
    """Assert the law in another interpreter."""
    done = subprocess.run(
        [python, "-c", CHECK, reference, env],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
def test_any_text_is_an_action_of_an_mcp_server(tmp_path: Path) -> None:
    check_apart(python_with(MCP, sees_ours=True), described(tmp_path), "tools")


@pytest.mark.long
def test_any_text_is_an_action_of_a_textarena_game() -> None:
    python = python_with(PACKAGES["textarena"], sees_ours=True)
    check_apart(python, "textarena:GuessTheNumber-v0", "GuessTheNumber-v0")


@pytest.mark.long
def test_any_text_is_an_action_of_a_verifiers_taskset(tmp_path: Path) -> None:
    with serving(tasksets.described(tmp_path, "tiny_words")) as url:
        asyncio.run(check_texts(url, "tasks"))
