"""Laws of the registry: it finds environments and names missing requirements."""

import textwrap
from pathlib import Path

import pytest

from common.config.env import RemoteOptions
from common.config.envs import BrowserOptions, ContainerOptions, EnvsSection, SandboxOptions
from common.formats.answers import BARE
from envhub.catalogue.registry import (
    LOADERS,
    REQUIREMENTS,
    Registry,
    Requirement,
    is_reference,
    missing_requirements,
    parse_options,
)
from envhub.env import Isolation, Style
from envhub.errors import UnknownEnv
from tests.configs import edited


def test_registry_names_the_nearest_environment():
    with pytest.raises(UnknownEnv, match="nearest is 'textcraft'"):
        Registry(["textcarft"])


def test_environment_that_is_not_offered_is_unknown():
    with pytest.raises(UnknownEnv, match="no environment 'babyai'; there are 'textcraft'"):
        Registry(["textcraft"]).spec("babyai")


def test_outside_environment_keeps_its_name_and_runs_in_workers():
    registry = Registry(["textcraft", "tests.envhub.outside:make_spec"])
    assert registry.names == ("faulty", "textcraft")
    spec = registry.spec("faulty")
    assert (spec.isolation, spec.sessions_per_worker) == (Isolation.WORKER, 64)


def test_explicit_number_of_sessions_is_kept(tmp_path: Path):
    path = tmp_path / "alone.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from tests.envhub.outside import make_spec as theirs\n"
        "def make_spec():\n    return replace(theirs(), sessions_per_worker=1)\n",
        encoding="utf-8",
    )
    spec = Registry([f"{path}:make_spec"]).spec("faulty")
    assert (spec.isolation, spec.sessions_per_worker) == (Isolation.WORKER, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("babyai", ["go to", "pickup", "toggle and go through"]),
        ("maze", ["move up", "goal"]),
        ("nim", ["take N", "wins"]),
        ("recall", ["turn left", "sign"]),
        ("rooms", ["go to COLOUR", "key"]),
        ("searchqa", ["<search>"]),
        ("sqlgym", ["SELECT"]),
        ("textcraft", ["craft N ITEM using", "get N ITEM", "inventory"]),
        ("wordle", ["six guesses", "g if"]),
    ],
)
def test_instructed_style_explains_rules_and_actions(name: str, words: list[str]):
    spec = Registry([name]).spec(name)
    assert all(word in spec.instruction[Style.INSTRUCTED] for word in words)
    assert spec.instruction[Style.INSTRUCTED].endswith(BARE) or spec.instruction[Style.COMPACT]


def test_instructed_style_has_the_compact_observations():
    spec = Registry(["textcraft"]).spec("textcraft")
    item = "depth2-train-0"
    assert spec.make(Style.INSTRUCTED).reset(item, 0) == spec.make(Style.COMPACT).reset(item, 0)


def test_outside_environment_keeps_its_own_worker_settings():
    spec = Registry(["tests.envhub.outside:make_worker"]).spec("fragile")
    assert (spec.isolation, spec.sessions_per_worker) == (Isolation.WORKER, 2)


def test_file_is_an_outside_environment(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("from tests.envhub.outside import make_worker as make_it\n", encoding="utf-8")
    assert Registry([f"{path}:make_it"]).names == ("fragile",)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no.such.module:make_spec", "No module named 'no'"),
        ("no/such/file.py:make_spec", "no such file"),
        ("tests.envhub.outside:make_nothing", "does not define a function 'make_nothing'"),
        ("os:system", "does not define a function 'system'"),
        ("os:abort", "does not define a function 'abort'"),
        ("os:environ", "does not define a function 'environ'"),
        ("tests.envhub.outside:make_misnamed", "is not printable"),
        ("platform:node", "returns str, not EnvSpec"),
    ],
)
def test_broken_reference_names_the_missing_part(reference: str, words: str):
    with pytest.raises(UnknownEnv, match=words):
        Registry([reference])


def test_worker_gets_the_options_of_the_hub():
    browser, plugins = BrowserOptions(max_sessions=3), {"size": "9"}
    sandbox = SandboxOptions(containers=ContainerOptions(memory_mib=77))
    options = EnvsSection(browser=browser, plugins=plugins, agentgym_rules=True, sandbox=sandbox)
    remote = RemoteOptions(url="http://h:1", dialect="alfworld", num_test=7)
    registry = Registry(["textcraft"], options, remote)
    order = registry.load_order("textcraft")
    assert is_reference(order["reference"])
    assert parse_options(order["options"]) == (options, remote)


def test_remote_dialect_is_offered_under_its_name():
    remote = RemoteOptions(url="http://h:1", dialect="alfworld")
    assert Registry(["textcraft"], None, remote).names == ("alfworld", "textcraft")


@pytest.fixture
def needy():
    """An environment with configurable requirements."""
    LOADERS["needy"] = "tests.envhub.inside.faulty"
    yield lambda *needs: REQUIREMENTS.update(needy=needs)
    del LOADERS["needy"], REQUIREMENTS["needy"]


def test_missing_program_is_named_with_the_remedy(needy):
    needy(Requirement(what="a moon", binaries=("no-such-binary",), remedy="apt install moon"))
    assert missing_requirements(["needy"]) == ["needy needs a moon: apt install moon"]


def test_missing_module_is_named_with_the_remedy(needy):
    needy(Requirement(what="the package moon", modules=("moon",), remedy="pip install moon"))
    assert missing_requirements(["needy"]) == ["needy needs the package moon: pip install moon"]


def test_one_of_several_programs_is_enough(needy):
    needy(Requirement(what="a shell", binaries=("no-such-binary", "sh"), remedy=""))
    assert missing_requirements(["needy"]) == []


def test_configured_program_replaces_the_path(needy):
    needs = Requirement(
        what="a browser",
        binaries=("no-such-binary",),
        remedy="install it",
        instead="browser.executable",
    )
    needy(needs)
    given = EnvsSection(browser=BrowserOptions(executable="/bin/sh"))
    assert missing_requirements(["needy"], given) == []
    wrong = EnvsSection(browser=BrowserOptions(executable="/no/such"))
    assert missing_requirements(["needy"], wrong) == ["needy needs a browser: install it"]


def test_registry_runs_the_environments_own_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = """
        def check(options):
            return [] if options.textcraft.recipes_dir else ["envs.textcraft.recipes_dir is unset"]
    """
    (tmp_path / "checked_environment.py").write_text(textwrap.dedent(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LOADERS, "checked", "checked_environment")
    lines = missing_requirements(["checked"])
    assert lines == ["checked: envs.textcraft.recipes_dir is unset"]
    options = EnvsSection()
    options = edited(options, {"textcraft.recipes_dir": "x"})
    assert missing_requirements(["checked"], options) == []


def test_local_requirements_do_not_apply_to_remote_environments(needy):
    needy(Requirement(what="a moon", binaries=("no-such-binary",), remedy="apt install moon"))
    remote = RemoteOptions(url="http://h:1", dialect="needy")
    assert missing_requirements(["needy"], None, remote) == []


def test_package_with_a_name_of_the_product_is_refused_by_name(tmp_path: Path):
    taken = "'common' is a name of this project, give your package another one"
    with pytest.raises(UnknownEnv, match=taken):
        Registry(["common.grade_of_mine:make"]).spec("x")
    path = tmp_path / "own.py"
    path.write_text("from common.grade_of_mine import make\n", encoding="utf-8")
    with pytest.raises(UnknownEnv, match=taken):
        Registry([f"{path}:make"])
