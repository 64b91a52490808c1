"""Every documented command and code block works: it is run, or the table gives a reason."""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import run
from benchmarks.command import GPU_SUITES, SUITES
from common.config.keys import declared, field_kinds
from common.config.load import load_config
from common.errors import ConfigError
from common.repository import ROOT
from tests.code_shape import WAYS, files_of_way
from tests.docs.blocks import PAGES, Block, blocks_of, commands_of, inline_of
from tests.docs.table import FOREIGN, RULES, How, Rule, rule_of
from tests.tools.dashboard.runs import make_run
from tools.cli.command_line import STUDIES, parse
from tools.cli.help import AllKeys, help_text

LANGUAGES = ("sh", "bash", "python", "yaml", "json", "text")
SCRIPTS = ("bash",)  # whole scripts, of which the syntax is checked
MAY_SAY_NO = ("play", "doctor", "show", "status")  # by exit code 1, and work
COMMAND = re.compile(r"^\s*(\$ )?(python3? |make |curl |pip |\.venv/)")
RUNS = ("quickstart", "mygame", "mine", "a", "b")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language == "sh" and "curl" not in block.text]
COMMANDS = {
    command: str(block)
    for block in [*SHELL, *(each for page in PAGES for each in inline_of(page))]
    for command in commands_of(block)
    if "..." not in command or "model.path=..." in command
}
RULED = [(each, rule) for each in COMMANDS if (rule := rule_of(each))]
STAND_INS = (  # Replace placeholders and the reader's own values.
    (r"model\.path=/models/\S+\0?", ""),
    (r"model\.path=(\.\.\.|runs/[^\0]+|FOLDER)(?=\0|$)", "model.path=configs/policies/tiny"),
    (r"--config\0(X|my-config)(?=\0|$)", "--config\0quickstart"),
    (r"--config\0mine(?=\0|$)", "--config\0textcraft-qwen7b"),
    (r"^(--config\0environments/mygame\.yaml)$", "\\1\0model.path=configs/policies/tiny"),
    (r"environments/mygame", "STAGE/environments/mygame"),
    (r"=runs/mine", "=STAGE/runs/mine"),
    (r"to=episodes", "to=STAGE/episodes"),
    (r"\0>\0.*", ""),
    (r"\bNAME\b", "quickstart"),
    (r"\bKEY\b", "learner.lr"),
    (r"\bSECTION\b", "learner"),
)


def test_every_code_block_declares_its_language():
    unmarked = [str(block) for block in BLOCKS if block.language not in LANGUAGES]
    assert unmarked == []


def test_other_blocks_hide_no_command():
    hidden = [
        f"{block}: {line}"
        for block in BLOCKS
        if block.language == "text" or (block.language == "bash" and "#!" not in block.text)
        for line in block.text.splitlines()
        if COMMAND.match(line)
    ]
    assert hidden == []


def test_every_command_is_checked_or_excused():
    known = {command for command, _ in RULED}
    assert [f"{where}: {each}" for each, where in COMMANDS.items() if each not in known] == []
    assert [rule.pattern for rule in RULES if rule.how is not How.RUN and not rule.reason] == []
    assert [rule.pattern for rule in RULES if rule not in {rule for _, rule in RULED}] == []


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs and the environment that the pages speak of."""
    folder = tmp_path_factory.mktemp("stage")
    for name in RUNS:
        make_run(folder / "runs" / name)
    run.main(["new-env", "mygame", f"to={folder / 'environments'}"])
    (folder / "policy.yaml").write_text("defaults: quickstart\n", encoding="utf-8")
    return folder


def staged(words: list[str], stage: Path) -> list[str]:
    """Return a command line whose placeholders are things that are there."""
    line = "\0".join(words)
    for old, new in STAND_INS:
        line = re.sub(old, new, line)
    return line.replace("STAGE", str(stage)).rstrip("\0").split("\0")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command line in this process; return its output."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))

    def carry_out(words: list[str], *, may_be: tuple[int, ...] = (0,)) -> str:
        capsys.readouterr()
        try:
            code = run.main(words)
        except SystemExit as ended:  # --help and the like
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert code in may_be, err or out
        return out

    return carry_out


def names_a_test(words: list[str]) -> bool:
    """Return whether `python -m pytest [-m long] FILE -k PART` names a test of a file."""
    file = next(word for word in words if word.endswith(".py"))
    text = (ROOT / file).read_text(encoding="utf-8")
    part = words[words.index("-k") + 1] if "-k" in words else ""
    return re.search(rf"^(async )?def test_\w*{re.escape(part)}", text, re.MULTILINE) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("command", "rule"), RULED, ids=[command for command, _ in RULED])
def test_documented_command_works(
    command: str, rule: Rule, stage: Path, call: Callable[..., str], tmp_path: Path
):
    words = shlex.split(command)
    if rule.how is How.MAKE:
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    if rule.how is How.COLLECT:
        assert names_a_test(words)
        return
    words = staged(words[2:], stage)
    if rule.how is How.RUN:
        own = {"new-env": f"to={tmp_path}", "status": f"run.dir={stage}/runs"}
        own |= {name: f"run.dir={stage}/runs" for name in ("show", "replay", "journal")}
        if words == ["status"]:
            words.append("quickstart")
        may_be = (0, 1) if words[0] in MAY_SAY_NO else (0,)
        call([*words, *filter(None, [own.get(words[0])])], may_be=may_be)
    elif rule.how is How.DRY:
        call([*words, *([] if "--dry-run" in words else ["--dry-run"])])
    elif rule.how is How.CONFIG:
        asked = parse(words)
        load_config(asked.config or "quickstart", asked.overrides, is_dry=True)
    elif rule.how is How.PARSE:
        assert parse(words).command in words[0]


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in ("python", "yaml", "json")], ids=str
)
def test_documented_code_block_works(block: Block, tmp_path: Path):
    if block.language == "python":
        code = compile(block.text, str(block), "exec")
        if not any(
            f"import {name}" in block.text or f"from {name}" in block.text for name in FOREIGN
        ):
            exec(code, {"__name__": "documentation"})
    elif block.language == "yaml":
        path = tmp_path / "shown.yaml"
        path.write_text(yaml.safe_dump({"defaults": "quickstart"}) + block.text, encoding="utf-8")
        load_config(str(path), [])
    else:
        json.loads(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in SCRIPTS], ids=str)
def test_documented_script_parses(block: Block):
    subprocess.run(["bash", "-n"], input=block.text, encoding="utf-8", check=True)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """The address of a hub, started by the documented command."""
    argv = [sys.executable, "run.py", "envhub", "env=textcraft,babyai", "port=0"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("hub: "))
        process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in BLOCKS if "curl" in b.text], ids=str)
def test_documented_requests_are_answered(block: Block, hub: str):
    asked = re.sub(r"localhost:8080|127\.0\.0\.1:8080", hub.removeprefix("http://"), block.text)
    script = 'set -euo pipefail; curl() { command curl -fsS "$@"; }\n' + asked
    done = subprocess.run(["bash"], input=script, encoding="utf-8", capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_configuration_reference_is_current():
    page = ROOT / "docs" / "CONFIGURATION.md"
    written = page.read_text(encoding="utf-8")
    assert written == help_text(["reference"]), (
        "python run.py help reference > docs/CONFIGURATION.md"
    )


def test_documentation_links_have_targets():
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert lost == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_documentation_anchors_exist():
    lost = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in re.findall(
            r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")
        )
        if not target.startswith("http")
        and anchor not in anchors_of(page.parent / target if target else page)
    ]
    assert lost == []


def test_named_suites_and_tests_exist():
    suites = {*SUITES, *GPU_SUITES, *STUDIES}
    lost: list[str] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wrong = [name for name in re.findall(r"--suite ([a-z0-9-]+)", text) if name not in suites]
        files = re.findall(r"`(?:\S+ )*?(tests/[\w/]+\.py)\b", text)
        wrong += [name for name in files if not (ROOT / name).is_file()]
        lost += [f"{page.relative_to(ROOT)}: {name}" for name in wrong]
    assert lost == []


def test_documented_keys_exist():
    sections = "|".join(field_kinds(AllKeys))
    key = re.compile(rf"`(({sections})(\[\d\])?(\.[a-z_0-9]+)+)(=[^`]*)?`")
    files = (".py", ".md", ".json", ".jsonl", ".yaml", ".log", ".html")
    unknown: list[str] = []
    for page in PAGES:
        for found in key.findall(page.read_text(encoding="utf-8")):
            if found[0].endswith(files) or is_module(found[0]):
                continue
            try:
                declared(found[0], shown=found[0], schema=AllKeys)
            except ConfigError as error:
                unknown.append(f"{page.name}: {error}")
    assert unknown == []


def is_module(name: str) -> bool:
    """Return whether a dotted name begins with one of our modules."""
    path = ROOT.joinpath(*name.split(".")[:2])
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_files_named_in_the_architecture_exist():
    assert [title for title in WAYS if len(list(files_of_way(title))) < 10] == []


def test_example_of_an_algorithm_is_its_file():
    blocks = [block.text for block in BLOCKS if block.page.name == "ADD_AN_ALGORITHM.md"]
    text = (ROOT / "docs/examples/own_algorithm.py").read_text(encoding="utf-8")
    assert text.rstrip() in blocks
    assert len(text.splitlines()) <= 20
