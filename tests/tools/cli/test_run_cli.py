"""Laws of the command line: its refusals and output in process, its cost in a subprocess."""

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

import run
from common.config.load import list_configs
from common.repository import ROOT
from tests.bounds import at_most
from tests.in_process import KEEPS_PROCESS
from tests.tools.checks.models import write_model
from tools.checks import hub_models
from tools.cli.command_line import SUITES, all_commands

TIMEOUT_S = 240
ARCHITECTURE = "configs/architectures/qwen2.5-7b-instruct"
LARGE = [name for name in list_configs() if "qwen" in name]  # their weights are on the hub


def run_cli(repository: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "run.py"), *argv],
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
    )


@dataclass(frozen=True, slots=True)
class Done:
    """What a command line has left."""

    returncode: int | str | None
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Carry out a command line in this process, with an empty cache of the model hub."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_models._resolve.cache_clear()
    for name, value in KEEPS_PROCESS.items():
        monkeypatch.setenv(name, value)

    def carry_out(*argv: str) -> Done:
        capsys.readouterr()
        try:
            code = run.main([*argv])
        except SystemExit as ended:  # argparse, after --help and the like
            code = ended.code or 0
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return carry_out


def children_cpu_s() -> float:
    """Return what all processes that were waited for have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["learner.lr=abc"], "learner.lr=abc: expects a number"),
        (["learnr.lr=1e-4"], "nearest is learner.lr"),
        (["--config", "nosuch"], "--config nosuch: no such config"),
        *[(["train", "--config", name], "model.path=Qwen/Qwen") for name in LARGE],
        (
            ["--config", "textcraft-qwen7b", f"model.path={ARCHITECTURE}"],
            f"model.path={ARCHITECTURE}: lacks tokenizer files, *.safetensors",
        ),
        (
            ["--config", "smoke", "learner.optimizer=muon", "learner.moments=8bit"],
            "learner.moments='8bit': must be fp32 with learner.optimizer=muon",
        ),
        (["actor", "--join", "h:1"], "--join HOST:PORT and --key FILE: each needs the other"),
        (
            ["train", "--join", "h:1", "--key", "k"],
            "--join: only the commands actor, envhub, learner can join",
        ),
        (["actor", "--join", "h:1", "--key", "/nosuch"], "--key /nosuch: No such file"),
        (["actor", "--join", "h", "--key", "/nosuch"], "--join h: expects HOST:PORT"),
        (["trian"], "trian: not a command or key=value; the nearest command is train"),
        (["train", "oops"], "oops: an override is key=value"),
        (["--confg", "smoke"], "--confg"),
        *[
            ([command, f"run.name={name}"], f"run.name={name!r:.100}: must be a plain file name")
            for command in ("train", "status", "actor", "learner", "merge")
            for name in ("", ".", "..", "../a", "/a", "latest", "a\nb", "x" * 300)
        ],
        (["status", f"run.dir={'x' * 300}"], "run.dir='xxx"),
        (["train", "--config", "x" * 300], "no such config"),
        (["train", "--config", "smoke", "groups.size=" + "9" * 400], "groups.size=999"),
        (["train", "--config", "smoke", "groups.size=" + "9" * 5000], "groups.size=999"),
        (["train", "--config", "smoke", "learner.lr=" + "9" * 400], "learner.lr=999"),
        (["train", "--config", "smoke", "learner.lr=2024-13-45"], "learner.lr=2024-13-45"),
        (["train", "--config", "smoke", "horizon.stages=" + "[" * 9000], "horizon.stages=[[["),
        (["train", "--config", "smoke", "tasks=${run.name}"], "tasks=${run.name}: expects"),
        (["train", "--config", "smoke", "envhub.envs=['os:system']"], "envhub.envs: environment"),
        (["train", "--config", "smoke", "envhub.host=192.0.2.1"], "envhub.host=192.0.2.1: not an"),
        (["--config", "smoke", "model.path=/nosuch"], "model.path=/nosuch: no such directory"),
        (
            ["--config", "smoke", "tasks=[{env: babyia, subset: GoToLocal}]"],
            "tasks[0].env='babyia'",
        ),
        (["--config", "smoke", "tasks=[{env: babyai, subset: GoTu}]"], "tasks[0].subset='GoTu'"),
        (["--config", "smoke", "tasks=[]"], "tasks=[]: a run needs at least one"),
        (["--config", "smoke", "tasks[0].weight=0"], "tasks=0.0: the weights must not sum to zero"),
        (["--config", "smoke", "horizon.stages=[5, 5]"], "horizon.stages=[5, 5]"),
        (["eval", "--config", "smoke", "tasks=[]"], "tasks=[]: add at least one task"),
        (["eval", "--config", "smoke", "eval.num_items=0"], "eval.num_items=0: must not be 0"),
        (["actor", "train.mode=fast"], "train.mode=fast"),
        (["status", "run.name=never-started"], "run.name=never-started"),
        (["--dry-run", "--config", "smoke", "model.path=/nosuch"], "model.path=/nosuch: no such"),
        (
            ["--dry-run", "--config", "textcraft-qwen7b", "model.architecture="],
            "model.path=Qwen/Qwen2.5-7B-Instruct: the cache lacks config.json, tokenizer.json",
        ),
        (
            ["--dry-run", "--config", "smoke", "tasks=[{env: babyai, subset: GoTu}]"],
            "tasks[0].subset='GoTu'",
        ),
        (
            ["--dry-run", "--config", "smoke", "envhub.url=http://127.0.0.1:9"],
            "envhub.url=http://127.0.0.1:9: no answer",
        ),
        (["sft", "sft.output=configs/policies/tiny"], "give sft.overwrite=true"),
        (
            ["train", "--json", "figures.json"],
            "--json: only the commands bench, eval and recompute accept it",
        ),
        (["bench", "--suite", "tail", "--json", "run.py/a"], "--json=run.py/a: no file can be"),
        (["bench", "--suite", "nosuch"], f"--suite=nosuch: one of {SUITES}"),
        (["doctor", "model.path=a", "model.path=b"], "model.path is given twice"),
    ],
)
def test_wrong_command_line_ends_with_one_line(argv: list[str], words: str, call: Call) -> None:
    done = call(*argv)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    "argv",
    [
        ["learnr.lr=1e-4"],
        ["eval", "--config", "smoke", "eval.num_items=0"],
        ["--dry-run", "--config", "smoke", "model.path=/nosuch"],
    ],
)
def test_wrong_command_line_ends_quickly(argv: list[str], repository: Path) -> None:
    before_s = children_cpu_s()
    done = run_cli(repository, *argv)  # ends within TIMEOUT_S
    assert children_cpu_s() - before_s < at_most(2.0)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_every_file_of_a_command_is_a_command() -> None:
    others = {"command_line", "output", "requested", "study"}
    files = {path.stem for path in (ROOT / "tools" / "cli").glob("*.py")} - others
    assert files == {name.replace("-", "_") for name in all_commands()}


def test_missing_packages_error_names_the_setup_command(repository: Path) -> None:
    bare = [sys.executable, "-S", str(repository / "run.py"), "--help"]
    done = subprocess.run(bare, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert " is not installed for " in done.stderr
    assert "make setup" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_dry_run_prints_config_and_objective_only(call: Call, tmp_path: Path) -> None:
    done = call("--dry-run", "--config", "smoke", f"run.dir={tmp_path}", "learner.lr=0.5")
    assert done.returncode == 0
    assert "  lr: 0.5\n" in done.stdout
    assert "\n# memory, host: about " in done.stdout
    assert " learner weights " in done.stdout
    assert "\n# objective: maximise mean_" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("more", "num"), [([], -1), (["eval.num_items=5"], 5)])
def test_task_list_evaluation_is_complete_unless_limited(
    more: list[str], num: int, call: Call
) -> None:
    argv = ["eval", "--dry-run", "--config", "smoke", "eval.items=tasks", *more]
    done = call(*argv)
    assert done.returncode == 0
    assert f"  num_items: {num}\n" in done.stdout


def test_help_names_commands_configs_and_an_override(call: Call) -> None:
    done = call("--help")
    assert done.returncode == 0
    for word in ("train", "actor", "doctor", "quickstart", "learner.lr=3e-4"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["help", "learner.lr"], "a number; must be in (0, 10]"),
        (["help", "learner"], "  learner.lr=1e-06"),
        (["help"], "  learner.*"),
        (["actor", "--help"], "usage: run.py actor "),
        (["--version"], "longstride 0."),
    ],
)
def test_help_and_version_are_printed(argv: list[str], words: str, call: Call) -> None:
    done = call(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("argv", [["help", "learner"], ["--version"]])
def test_help_and_version_are_printed_quickly(argv: list[str], repository: Path) -> None:
    before_s = children_cpu_s()
    done = run_cli(repository, *argv)
    assert children_cpu_s() - before_s < at_most(1.0)
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_key_help_exits_2_with_nearest(call: Call) -> None:
    done = call("help", "learner.lrr")
    assert done.returncode == 2
    assert "nearest is learner.lr" in done.stderr


def test_joining_role_uses_config_of_its_run(call: Call, tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(
        f"run: {{name: mine, dir: '{tmp_path}'}}\nmodel: {{path: p}}\ntrain: {{num_steps: 77}}\n",
        encoding="utf-8",
    )
    where = [f"run.dir={tmp_path}", "run.name=mine"]
    done = call("actor", "--dry-run", *where, "actor.name=extra")
    assert "num_steps: 77\n" in done.stdout
    assert "name: extra\n" in done.stdout


def joins(folder: Path, name: str) -> list[str]:
    """Write the config of a run and return the overrides that name it."""
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(
        f"run: {{name: {name}, dir: '{folder}'}}\nmodel: {{path: p}}\n", encoding="utf-8"
    )
    return [f"run.dir={folder}", f"run.name={name}"]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "envhub"])
def test_joining_an_unknown_run_suggests_the_nearest(role: str, call: Call, tmp_path: Path) -> None:
    joins(tmp_path, "maze-long")
    joins(tmp_path, "other")
    done = call(role, f"run.dir={tmp_path}", "run.name=maze-lonk")
    assert done.returncode == 2
    assert "run.name=maze-lonk: no such run" in done.stderr
    assert "the nearest is maze-long" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["maze-long", "other"]


@pytest.mark.slow
def test_doctor_examines_the_run_of_its_arguments(call: Call) -> None:
    wrong = ["--config", "smoke", "model.path=/nosuch", "actor.num_actors=2"]
    done = call("doctor", *wrong)
    assert done.returncode == 1
    assert "-> model.path=/nosuch: no such directory" in done.stdout
    right = call("doctor", "--config", "smoke")
    assert "config smoke" in right.stdout
    assert "a run can start and needs memory: host" in right.stdout
    for line in ("ok   c++ compiler", "ok   cpu ", "ok   system "):
        assert line in right.stdout


def test_missing_model_is_named_as_a_key(call: Call, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("train: {num_steps: 1}", encoding="utf-8")
    done = call("--config", str(own))
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path is not set: give model.path=")


@pytest.mark.slow
def test_preset_doctor_names_missing_model_and_continues(call: Call) -> None:
    done = call("doctor", "--config", "textcraft-qwen7b")
    assert "-> model.path=Qwen/Qwen2.5-7B-Instruct: the cache lacks config.json" in done.stdout
    assert "Plan for the target, 1 node with 8 GPUs of 79.6 GiB:" in done.stdout
    assert "env textcraft" in done.stdout


@pytest.mark.slow
def test_evaluation_adapts_context_and_turns_to_model(call: Call, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=4096)
    done = call("eval", "--dry-run", f"model.path={model}")
    assert done.returncode == 0, done.stderr
    assert "  max_model_len: 4096\n" in done.stdout
    assert "  max_turn_tokens: 512\n" in done.stdout
    assert "  dtype: bfloat16\n" in done.stdout
    said = "actor.max_model_len=4096 actor.max_turn_tokens=512 actor.kv_cache_gib=1"
    assert said in done.stderr
    argv = ["eval", "--dry-run", f"model.path={model}", "actor.max_turn_tokens=99"]
    assert "  max_turn_tokens: 99\n" in call(*argv).stdout


@pytest.mark.slow
def test_evaluation_of_configured_policy_keeps_its_settings(call: Call) -> None:
    same = f"model.path={ROOT}/configs/policies/tiny"
    done = call("eval", "--dry-run", same)
    assert "  max_turn_tokens: 12\n" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_interrupted_command_exits_130_without_a_traceback() -> None:
    argv = [sys.executable, str(ROOT / "run.py"), "bench", "--suite", "transport"]
    pipe = subprocess.PIPE
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background is deaf
    with subprocess.Popen(
        argv, stdout=pipe, stderr=pipe, encoding="utf-8", preexec_fn=heard
    ) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.kill()
    assert child.returncode == 130
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said
