"""Laws of terminal tasks: layouts, commands, the tests at the end and their isolation."""

import asyncio
import io
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import EnvsSection, TerminalOptions
from common.errors import ConfigError
from envhub.env import EnvFailure, StepResult, Style
from envhub.envs.terminal.env import (
    PACK,
    PACKED,
    TerminalEnv,
    TerminalTasks,
    check,
    files_of_archive,
    load_terminal_tasks,
    make_spec,
)
from envhub.envs.terminal.tasks import load_tasks_of
from envhub.envs.terminal.texts import action_of, command_of, reward_of
from tests.envhub.sandbox.boxes import OPTIONS, need_bubblewrap
from tools.author.check_env import check_players
from tools.author.checks import Grade, play_all
from tools.author.episodes import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PASSES = '#!/bin/bash\n[ "$(cat /app/out)" = right ]\n'
KEY = "envs.terminal.train"


def harbor(folder: Path, *, test: str = PASSES, settings: str = "", **files: str) -> Path:
    """Write a task in Harbor's layout; `files` are further files by name, `__` for each slash."""
    task = folder / "tasks" / "first"
    held = {"task.toml": settings, "instruction.md": "Write right into out.", "tests/test.sh": test}
    held |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in held.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text, encoding="utf-8")
    return task


def options_of(folder: Path, **own: Any) -> EnvsSection:
    """Return the options of the tasks of a folder."""
    given = {"command_timeout_s": 120.0, **own}
    tasks = TerminalOptions(train=str(folder / "tasks"), **given)
    return EnvsSection(sandbox=OPTIONS, terminal=tasks)


def played(options: EnvsSection, actions: Sequence[str], item: int = 0) -> list[StepResult]:
    """Return the results of the actions of an episode."""
    need_bubblewrap()

    async def play() -> list[StepResult]:
        env = make_spec(options).make(Style.COMPACT)
        assert isinstance(env, TerminalEnv)
        try:
            await env.reset(f"tasks-train-{item}", 0)
            return [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(play())


def test_tests_decide_when_the_agent_submits(tmp_path: Path) -> None:
    harbor(tmp_path)
    first, last = played(options_of(tmp_path), ["echo right > out", "submit"])
    assert (first.observation, first.reward, first.done) == ("[no output]", 0.0, False)
    assert (last.reward, last.done, last.is_success, last.is_truncated) == (1.0, True, True, False)
    [last] = played(options_of(tmp_path), ["submit"])
    assert (last.reward, last.is_success) == (0.0, False)


def test_tests_decide_after_the_last_turn(tmp_path: Path) -> None:
    harbor(tmp_path)
    [last] = played(options_of(tmp_path, max_turns=1), ["echo right > out"])
    assert (last.reward, last.done, last.is_truncated) == (1.0, True, False)
    assert last.metrics is not None
    assert last.metrics["at_limit"] == 1.0


def test_time_of_the_agent_ends_the_episode(tmp_path: Path) -> None:
    harbor(tmp_path, settings="[agent]\ntimeout_sec = 3\n")
    [last] = played(options_of(tmp_path), ["echo right > out; sleep 600"])
    assert "took longer than 3 s" in last.observation
    assert (last.reward, last.is_truncated) == (1.0, False)


def test_shell_keeps_its_directory_and_variables(tmp_path: Path) -> None:
    harbor(tmp_path)
    actions = ["mkdir 'a b'; cd 'a b'; export X='1 2'; Y=3", 'pwd; echo "$X$Y"; exit 4', "pwd"]
    _, second, third = played(options_of(tmp_path), actions)
    assert second.observation == "/app/a b\n1 2\n[exit code 4]"
    assert third.observation == "/app/a b"


def test_output_is_cut_with_a_note(tmp_path: Path) -> None:
    harbor(tmp_path)
    [result] = played(options_of(tmp_path, output_chars=100), ["seq 1000"])
    assert result.observation.startswith("1\n2\n")
    assert result.observation.endswith("999\n1000")
    assert "characters were left out here]" in result.observation
    assert len(result.observation) < 160


@pytest.mark.parametrize("action", ["", "  ", "```bash\n```", "Action:"])
def test_empty_action_is_invalid(tmp_path: Path, action: str) -> None:
    harbor(tmp_path)
    [result] = played(options_of(tmp_path), [action])
    assert (result.is_valid, result.done) == (False, False)


def test_command_is_the_last_block_or_the_text() -> None:
    assert command_of("First.\n```bash\nls\n```\nThen\n```\npwd\n```") == "pwd"
    assert command_of("Thought: x\nAction: ls -l") == "ls -l"
    assert command_of(" ls ") == "ls"


DOCUMENT = "cat > README.md <<'EOF'\n# Use\n```sh\nmake\n```\nEOF\necho ok > out.txt"
STRING = "printf '%s' '\n```sh\nmake\n```\n' > README.md"
LOG = "cat > log <<END\nAction: jump\nEND"


@pytest.mark.parametrize("command", [DOCUMENT, STRING, LOG])
@pytest.mark.parametrize(
    "action",
    [
        "{}",
        "```bash\n{}\n```",
        "````sh\n{}\n````",
        "~~~\n{}\n~~~",
        "I'll write it.\n```bash\n{}\n```\nThat's it.",
        "Action: {}",
        "Thought: I don't know.\nAction:\n```bash\n{}\n```",
    ],
)
def test_fences_and_labels_in_a_command_are_parts_of_it(action: str, command: str) -> None:
    assert command_of(action.format(command)) == command


@pytest.mark.parametrize(
    "command",
    [
        'grep "Action: jump" log.txt',
        'printf "Thought\nAction: go\n" > a.txt',
        DOCUMENT,
        "echo $((1<<3)) <<<x",
        "cat <<-E\n\t```\n\tE\nls",
        "cat <<A <<'B C'\n```\nA\n```\nB C\nls",
        "ls # don't\npwd",
        "echo $'it\\'s' it\\'s \"it's\"",
    ],
)
def test_command_is_not_cut(command: str) -> None:
    assert command_of(f"```bash\n{command}") == command
    assert command_of(command) == command
    assert command_of(f"```bash\n{command}\n```") == command


@pytest.mark.parametrize(
    "action",
    [
        "```python\nprint(1)\n```",
        "Action: ls\nAction: pwd",
        "```bash\nls\n```\nAction: pwd",
        "```bash\nls\n```sh\npwd\n```",
        "```bash\ncat > README.md <<'EOF'\n```sh\nmake\n```",  # The end of the document is missing.
        "```bash\necho don't\n```\nThat's it.",
    ],
)
def test_ambiguous_action_has_no_command(action: str) -> None:
    assert command_of(action) == ""


@pytest.mark.parametrize("command", ["ls", DOCUMENT, "x'\n```\nls\n```\n'", "echo\nAction: x"])
def test_action_of_a_command_has_the_command(command: str) -> None:
    assert command_of(action_of(command)) == command


def test_command_reads_no_variables_of_the_shell_around_it(tmp_path: Path) -> None:
    harbor(tmp_path)
    actions = ['echo "${1-none} $#"; state=/app/x; cd /tmp', "pwd; ls /app"]
    first, second = played(options_of(tmp_path), actions)
    assert (first.observation, second.observation) == ("none 0", "/tmp")


def test_tests_are_absent_until_the_end(tmp_path: Path) -> None:
    harbor(tmp_path)
    found, _ = played(
        options_of(tmp_path), ["ls -A /tests /logs; find / -name 'test.sh' 2>&1", "pwd"]
    )
    assert "test.sh" not in found.observation.replace("find:", "")


@pytest.mark.parametrize(
    "trick",
    [
        "mkdir /tests/test.sh; touch /tests/test.sh/x; chmod 000 /tests/test.sh; chmod 000 /tests",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "(setsid bash -c 'while :; do echo exit 0 > /tests/test.sh; done' &) ; true",
        "mkdir /logs/verifier; ln -s /app/fake /logs/verifier/reward.txt; echo 1 > fake",
        "ln -s /etc/passwd out",
        f"ln -s {__file__} out",
        "dd if=/dev/zero of=/tests/full bs=1M count=100",
        "echo exit 0 > ~/.bashrc; cp ~/.bashrc ~/.profile; export BASH_ENV=~/.bashrc",
    ],
)
def test_tricks_do_not_pass_the_tests(tmp_path: Path, trick: str) -> None:
    harbor(tmp_path)
    _, last = played(options_of(tmp_path), [trick, "submit"])
    assert (last.done, last.reward) == (True, 0.0)


def test_tests_run_in_the_agents_work_folder(tmp_path: Path) -> None:
    test = "pwd > /app/where; [ \"$TEST_DIR $SEEN $OWN\" = '/tests it x' ] && [ -f out ]\n"
    settings = '[verifier]\ntimeout_sec = 60.0\nenv = { SEEN = "it" }\n'
    docker = "FROM x\nENV OWN=x\nWORKDIR /app\n"
    harbor(tmp_path, test=test, settings=settings, environment__Dockerfile=docker)
    *_, last = played(options_of(tmp_path), ["touch out", "submit"])
    assert last.reward == 1.0


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [("txt", "0.25", 0.25), ("json", '{"reward": 0.5, "x": 0}', 0.5), ("json", '{"a": 0.5}', 0.5)],
)
def test_written_reward_is_the_reward(tmp_path: Path, name: str, text: str, reward: float) -> None:
    harbor(tmp_path, test=f"echo '{text}' > /logs/verifier/reward.{name}; exit 1\n")
    [last] = played(options_of(tmp_path), ["submit"])
    assert last.reward == reward


@pytest.mark.parametrize(
    ("text", "reward"), [(".5", 0.5), ("1.", 1.0), (" 1\n", 1.0), ("1e-1", 0.1)]
)
def test_numbers_of_shell_programs_are_rewards(text: str, reward: float) -> None:
    assert reward_of(text) == reward


@pytest.mark.parametrize(
    "text",
    [
        "",
        "high",
        "2",
        "-0.1",
        "NaN",
        "inf",
        "1 0",
        "0\n1\n",
        "true",
        "{}",
        '{"reward": "x"}',
        '{"a": 1, "b": 0}',
    ],
)
def test_unusable_reward_is_a_failure(text: str) -> None:
    with pytest.raises(ValueError, match=r"reward|Expecting"):
        reward_of(text)


@pytest.mark.parametrize("code", [0, 1])
def test_verifier_that_never_writes_its_reward_is_a_failure(tmp_path: Path, code: int) -> None:
    test = f"[ -e lost ] && echo 1 > /logs/verifier/reward.txt\nexit {code}\n"
    harbor(tmp_path, test=test, **{"solution__solve.sh": "touch out"})
    with pytest.raises(EnvFailure, match=f"the tests gave no reward, with exit code {code}"):
        played(options_of(tmp_path), ["submit"])


def test_verifier_that_ends_early_is_zero_if_the_solution_has_a_reward(tmp_path: Path) -> None:
    test = "set -e\n[ -e out ]\necho 1 > /logs/verifier/reward.txt\n"
    harbor(tmp_path, test=test, **{"solution__solve.sh": "touch out"})
    [last] = played(options_of(tmp_path), ["submit"])
    assert (last.reward, last.done) == (0.0, True)


def test_outage_of_the_tests_network_is_no_reward_after_an_earlier_episode(tmp_path: Path) -> None:
    """The reference solution is tried again: it has no reward without the network either."""
    need_bubblewrap()
    server = "/srv"  # A folder of every machine that sandboxes have as a mount only.
    test = f"set -e\n[ -e {server} ]\n[ -e out ]\necho 1 > /logs/verifier/reward.txt\n"
    harbor(tmp_path, test=test, **{"solution__solve.sh": "touch out"})
    options = replace(options_of(tmp_path), sandbox=replace(OPTIONS, mounts=[server]))

    async def reward(shared: TerminalTasks) -> float:
        env = TerminalEnv(shared)
        try:
            await env.reset("tasks-train-0", 0)
            return (await env.step("submit")).reward
        finally:
            await env.close()

    loaded = load_terminal_tasks(options)
    tasks = {"train": [replace(each, has_network=True) for each in loaded.tasks["train"]]}
    shared = replace(loaded, tasks={**loaded.tasks, **tasks})
    assert asyncio.run(reward(shared)) == 0.0
    away = load_terminal_tasks(replace(options, sandbox=OPTIONS))
    with pytest.raises(EnvFailure, match="the tests gave no reward, with exit code 1"):
        asyncio.run(reward(replace(shared, backend=away.backend)))


@pytest.mark.parametrize("kind", ["sparse", "links"])
def test_artifacts_longer_than_their_archive_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub.envs.terminal.env.MAX_ARTIFACT_BYTES", 40_000)
    content = io.BytesIO()
    with tarfile.TarFile(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        first = tarfile.TarInfo("logs/artifacts/a")
        first.size = 15_000
        if kind == "sparse":
            first.pax_headers = {"GNU.sparse.size": "1000000", "GNU.sparse.map": "0,15000"}
        archive.addfile(first, io.BytesIO(bytes(first.size)))
        for name in "bcd" if kind == "links" else "":
            link = tarfile.TarInfo(f"logs/artifacts/{name}")
            link.type = tarfile.LNKTYPE
            link.linkname = first.name
            archive.addfile(link)
    with pytest.raises(ValueError, match="more than 40000 bytes"):
        files_of_archive(content.getvalue(), ["/logs/artifacts"])


def test_artifact_that_a_process_still_writes_is_packed(tmp_path: Path) -> None:
    """GNU tar then ends with exit code 1, and the archive is complete."""
    log = tmp_path / "log"
    log.write_bytes(bytes(60_000_000))
    packed = tmp_path / "packed.tar"
    script = PACK.replace(PACKED, str(packed))
    writes = ["sh", "-c", 'while :; do echo >> "$1"; done', "sh", log]
    with subprocess.Popen(writes) as writer:
        try:
            done = subprocess.run(["sh", "-c", script, "sh", log], capture_output=True, check=False)
        finally:
            writer.kill()
    assert b"file changed as we read it" in done.stderr
    assert done.returncode == 0
    [artifact] = files_of_archive(packed.read_bytes(), [str(log)])
    assert len(artifact.content) >= 60_000_000


def test_processes_of_the_tests_that_hold_the_output_do_not_delay_them(tmp_path: Path) -> None:
    test = "sleep 600 &\nsetsid sleep 600 &\necho 1 > /logs/verifier/reward.txt\n"
    harbor(tmp_path, test=test, settings="[verifier]\ntimeout_sec = 60\n")
    [last] = played(options_of(tmp_path), ["submit"])
    assert last.reward == 1.0


def test_tests_that_cannot_run_are_a_failure(tmp_path: Path) -> None:
    harbor(tmp_path, test="no-such-program --check\n")
    with pytest.raises(EnvFailure, match="no-such-program: command not found"):
        played(options_of(tmp_path), ["submit"])


def test_tests_beyond_their_time_fail(tmp_path: Path) -> None:
    settings = "[verifier]\ntimeout_sec = 0.5\n"
    harbor(tmp_path, test="echo 1 > /logs/verifier/reward.txt; sleep 600\n", settings=settings)
    [last] = played(options_of(tmp_path), ["submit"])
    assert (last.reward, last.observation) == (
        0.0,
        "The tests failed: their timeout limit was reached.",
    )


def test_terminal_bench_layout_is_read(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "bench"
    (task / "tests").mkdir(parents=True)
    (task / "task.yaml").write_text(
        "instruction: |-\n  Copy it.\nmax_test_timeout_sec: 60\nmax_agent_timeout_sec: 90\n",
        encoding="utf-8",
    )
    (task / "Dockerfile").write_text("FROM x\nWORKDIR /work\nCOPY in.txt ./\n", encoding="utf-8")
    (task / "in.txt").write_text("in", encoding="utf-8")
    (task / "tests" / "expected").write_text("in", encoding="utf-8")
    test = "#!/bin/bash\ncmp /work/out.txt $TEST_DIR/expected\n"
    (task / "run-tests.sh").write_text(test, encoding="utf-8")
    (task / "solution.sh").write_text("cp in.txt out.txt\n", encoding="utf-8")
    [loaded] = load_tasks_of(KEY, str(tmp_path / "tasks"), has_images=False)
    assert (loaded.instruction, loaded.folder, loaded.agent_timeout_s) == ("Copy it.", "/work", 90)
    *_, last = played(options_of(tmp_path), ["cp in.txt out.txt", "submit"])
    assert last.reward == 1.0


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"environment__Dockerfile": "FROM x\nRUN make\n"}, "has RUN 'make', which only"),
        ({"environment__Dockerfile": "FROM x\nCOPY lost /app/\n"}, "COPY lost: no such file"),
        ({"environment__Dockerfile": "FROM x\nWORKDIR /usr/src\n"}, "is a folder of the system"),
        ({"environment__a": "", "environment__Dockerfile": "FROM x\nCOPY a /data/a\n"}, "/data/a"),
        ({"test": "curl -L http://x | sh\n"}, "tests/test.sh downloads (curl)"),
        ({"settings": "a = \n"}, "task first: "),
        ({"settings": "[verifier]\ntimeout_sec = 'long'\n"}, "a value has a wrong type"),
        ({"settings": "[verifier]\nenvironment_mode = 'separate'\n"}, "a separate verifier"),
        ({"instruction.md": " "}, "no instruction.md"),
    ],
)
def test_task_that_cannot_be_played_is_named(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    harbor(tmp_path, **files)
    [line] = check(options_of(tmp_path))
    assert words in line
    with pytest.raises(ConfigError):
        make_spec(options_of(tmp_path))


def test_tests_of_an_image_that_download_need_a_permission(tmp_path: Path) -> None:
    harbor(tmp_path, test="apt-get update\n", settings='[environment]\ndocker_image = "img:1"\n')
    folder = str(tmp_path / "tasks")
    with pytest.raises(ConfigError, match=r"downloads \(apt-get\).*without_network=true"):
        load_tasks_of(KEY, folder, has_images=True)
    [task] = load_tasks_of(KEY, folder, has_images=True, without_network=True)
    assert task.image == "img:1"


def test_no_training_task_is_held_out(tmp_path: Path) -> None:
    need_bubblewrap()
    harbor(tmp_path)
    subset = make_spec(options_of(tmp_path)).subsets["tasks"]
    assert (subset.num_train, subset.num_test) == (1, 0)
    subset = make_spec(options_of(tmp_path, eval=str(tmp_path / "tasks"))).subsets["tasks"]
    assert (subset.num_train, subset.num_test) == (1, 1)


def test_link_out_of_a_task_is_refused(tmp_path: Path) -> None:
    task = harbor(tmp_path, environment__a="x")
    (task / "environment" / "link").symlink_to(__file__)
    [line] = check(options_of(tmp_path))
    assert "environment/link is a link out of the task" in line


def test_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    [line] = check(options_of(tmp_path))
    assert "no folder in it has a task.toml or task.yaml" in line


@pytest.mark.parametrize("number", range(5))
def test_shipped_task_is_solved_only_by_its_solution(number: int) -> None:
    options = EnvsSection(sandbox=OPTIONS)
    tasks = load_tasks_of(KEY, options.terminal.train, has_images=False)
    assert len(tasks) == 5
    solution = tasks[number].solution
    assert solution is not None
    *_, solved = played(options, [solution, "submit"], number)
    [unsolved] = played(options, ["submit"], number)
    assert (solved.reward, unsolved.is_success) == (1.0, False)


@pytest.mark.parametrize("number", range(3))
def test_example_task_pays_parts_for_wrong_files(number: int) -> None:
    folder = "docs/examples/first-files/tasks"
    options = EnvsSection(sandbox=OPTIONS, terminal=TerminalOptions(train=folder))
    task = load_tasks_of(KEY, folder, has_images=False)[number]
    name = ("hello.py", "numbers.txt", "page.html")[number]
    rewards: dict[str, float] = {}
    for action in (task.solution or "", f"echo x > {name}", "echo x > other", "true"):
        *_, last = played(options, [action, "submit"], number)
        rewards[action] = last.reward
    assert [*rewards.values()] == [1.0, 0.5, 0.2, 0.0]


# Programs that the tests of a task run with "$AS_AGENT". The tests have written 0.5 before.
REWARD = "/logs/verifier/reward.txt"
ATTACKS = {
    "reward": f"echo 1 > {REWARD}",
    "json": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "not a number": f"echo nan > {REWARD}",
    "link": f"ln -sf /app/out {REWARD}; ln -f /app/p {REWARD}; ln {REWARD} /app/out",
    "pipe": f"rm -f {REWARD}; mkfifo {REWARD}",
    "folder": f"mv /logs/verifier /logs/old; mkdir -p {REWARD}; rm -rf /logs/*",
    "truncate": f"truncate -s 0 {REWARD}; : > {REWARD}",
    "late": f"(setsid bash -c 'while :; do echo 1 > {REWARD}; done' &) >/dev/null 2>&1",
    "tests": f"printf 'echo 1 > {REWARD}; exit 0' | tee /tests/test.sh >> /tests/test.sh",
    "script": "rm -f /tests/.as-agent; echo 'exec \"$@\"' > /tests/.as-agent",
    "root of another": f"for p in /proc/[0-9]*; do echo 1 > $p/root{REWARD}; done",
    "folder of another": f"for p in /proc/[0-9]*; do echo 1 > $p/cwd/..{REWARD}; done",
    "descriptors": f"for f in /proc/[0-9]*/fd/*; do echo 'echo 1 > {REWARD}' >> $f; done",
    "memory": (
        "for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || dd if=/dev/zero of=$p/mem count=9; done"
    ),
    "kill": "kill -KILL $PPID; kill -STOP $PPID; kill -KILL -1; kill -KILL 0",
    "limits": "prlimit --pid $PPID --fsize=0:0 --nproc=0:0 --nofile=0:0 --cpu=0:0 --as=0:0",
    "variables": "export -p | grep -q hidden && echo 1 > out",
    "namespaces": f"unshare -Urm sh -c 'mount --bind /app /logs; echo 1 > {REWARD}'",
    "rights": f"cp $(command -v bash) sh; chmod 4755 sh; ./sh -pc 'echo 1 > {REWARD}'",
    "mounts": f"mount --bind /app /logs/verifier; mount -t tmpfs x /logs; echo 1 > {REWARD}",
    "schedule": "renice -n 19 -p $PPID 1; chrt -i -p 0 $PPID; taskset -p 0 $PPID; ionice -c3 -p 1",
    "parent": f"mv /logs /old; mkdir -p /logs/verifier; echo 1 > {REWARD}; ln -sfn /app /logs",
    "trace": (
        "P=$PPID python3 -c 'import ctypes, os; c = ctypes.CDLL(None)\n"
        'for p in (1, int(os.environ["P"])):\n'
        " c.ptrace(16, p, 0, 0)\n c.process_vm_writev(p, 0, 0, 0, 0, 0)'"
    ),
    "reads": "cp /tests/test.sh /app/copy; cat /tests/test.sh > out; ls /tests /logs > out",
}
# The tests remove the verdict if a program could change it or read the tests.
RUNS = f"""
echo 0.5 > {REWARD}
"$AS_AGENT" bash /app/p
[ -f /app/started ] && ! [ -s /app/out ] && ! [ -s /app/copy ] || rm {REWARD}
for _ in 1 2 3 4; do [ "$(cat {REWARD})" = 0.5 ] || rm {REWARD}; sleep 0.05; done
exit 0
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_program_of_the_agent_cannot_reach_the_verdict(tmp_path: Path, name: str) -> None:
    settings = '[verifier]\nenv = { SECRET = "hidden" }\n'
    harbor(tmp_path, test=RUNS, settings=settings)
    write = f"cat > p <<'END'\ntouch /app/started\n{ATTACKS[name]}\nEND"
    *_, last = played(options_of(tmp_path, test_timeout_s=30.0), [write, "submit"])
    assert last.reward == 0.5


UNREADABLE = [
    "chmod 0 /logs/verifier/reward.txt",
    "chmod 0 /logs/verifier",
    "echo nan > /logs/verifier/reward.txt",
    "rm -r /logs/verifier; mkfifo /logs/verifier",
    "rm /logs/verifier/reward.txt; mkdir /logs/verifier/reward.txt",
    "rm /logs/verifier/reward.txt",
    "head -c 200000 /dev/zero > /logs/verifier/reward.txt",
    "yes [ | head -c 90000 | tr -d '\\n' > /logs/verifier/reward.txt",
]


@pytest.mark.parametrize("trick", UNREADABLE)
def test_verdict_that_a_program_spoilt_is_zero(tmp_path: Path, trick: str) -> None:
    """These tests run the agent's program with their own rights, as published tasks do."""
    harbor(tmp_path, test=f"echo 0 > {REWARD}; bash /app/p; exit 0\n")
    *_, last = played(options_of(tmp_path), [f"echo '{trick}' > p", "submit"])
    assert (last.reward, last.done) == (0.0, True)


@pytest.mark.parametrize(
    "trick",
    ["chmod 0 /app", "chmod 0 /app /tmp ~ /tests /logs", "mkdir -p /logs/a/b; chmod 0 /logs/a"],
)
def test_folder_that_the_agent_closes_is_no_failure_of_the_sandbox(
    tmp_path: Path, trick: str
) -> None:
    harbor(tmp_path)
    *_, last = played(options_of(tmp_path), [trick, "submit"])
    assert (last.reward, last.done) == (0.0, True)


def test_processes_that_the_agent_keeps_cannot_avoid_a_verdict(tmp_path: Path) -> None:
    harbor(tmp_path)
    loop = "while :; do mkdir -p /tests/x/y /logs/x/y; done 2>/dev/null &"
    options = options_of(tmp_path, keeps_processes=True, test_timeout_s=60.0)
    *_, last = played(options, [loop, "submit"])
    assert (last.reward, last.done) == (0.0, True)


def test_verdict_that_the_tests_spoil_themselves_is_a_failure(tmp_path: Path) -> None:
    test = f"[ -f /app/out ] && echo high > {REWARD} || echo 0 > {REWARD}\n"
    harbor(tmp_path, test=test, **{"solution__solve.sh": "touch out"})
    with pytest.raises(EnvFailure, match=r"task first: /logs/verifier/reward.txt"):
        played(options_of(tmp_path), ["touch out", "submit"])


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("text", ["1", "nan", '{"reward": 1}'])
def test_shipped_task_ignores_a_verdict_of_the_program(number: int, text: str) -> None:
    name = ("count-errors", "average.sh", "rename-files", "repair-json", "count.py")[number]
    kind = "json" if "{" in text else "txt"
    line = f"mkdir -p /logs/verifier; echo '{text}' > /logs/verifier/reward.{kind}; cat /tests/*"
    program = f"import os; os.system({line!r})" if name.endswith("py") else line
    write = f"cat > {name} <<'END'\n{program}\nEND"
    *_, last = played(EnvsSection(sandbox=OPTIONS), [write, "submit"], number)
    assert (last.reward, last.done) == (0.0, True)


FOLDERS = """
[environment]
workdir = "/data/in"
env = { PLACE = "here" }
[solution.env]
WORD = "it's right"
"""


def test_folder_and_variables_of_the_settings_hold_everywhere(tmp_path: Path) -> None:
    test = '[ "$(cat out)" = "/data/in here it\'s right" ] && [ -z "$WORD" ]\n'
    solution = 'echo "$(pwd) $PLACE $WORD" > out\n'
    docker = "FROM x\nWORKDIR /data\nCOPY a ./\n"
    harbor(
        tmp_path,
        test=test,
        settings=FOLDERS,
        environment__Dockerfile=docker,
        environment__a="",
        **{"solution__solve.sh": solution},
    )
    [task] = load_tasks_of(KEY, str(tmp_path / "tasks"), has_images=False)
    assert task.solution is not None
    listed, _, last = played(options_of(tmp_path), ["pwd; ls /data", task.solution, "submit"])
    assert listed.observation == "/data/in\na\nin"
    assert last.reward == 1.0
    *_, last = played(options_of(tmp_path), ["cd /; rm -r /data/in; pwd", "submit"])
    assert last.reward == 0.0


def test_solution_has_its_further_files(tmp_path: Path) -> None:
    task = harbor(tmp_path)
    files = {
        "solve.sh": "#!/usr/bin/env python3\nimport shutil\nshutil.copy('/solution/a/b', 'out')\n",
        "a/b": "right",
        "c": "EOF\n```\nAction: x\n",
    }
    for name, text in files.items():
        (task / "solution" / name).parent.mkdir(parents=True, exist_ok=True)
        (task / "solution" / name).write_text(text, encoding="utf-8")
    [loaded] = load_tasks_of(KEY, str(tmp_path / "tasks"), has_images=False)
    assert loaded.solution is not None
    first, seen, last = played(
        options_of(tmp_path), [action_of(loaded.solution), "cat /solution/c", "submit"]
    )
    assert (first.observation, seen.observation) == ("[no output]", files["c"].rstrip())
    assert last.reward == 1.0


def test_dockerfile_holds_in_the_sandbox(tmp_path: Path) -> None:
    docker = (
        'FROM x\nENV PATH="/my app/bin:$PATH" A="b c"\nWORKDIR /my app\nCOPY --chmod=755 t bin/\n'
    )
    harbor(tmp_path, environment__Dockerfile=docker, environment__t="#!/bin/sh\necho t $A\n")
    [seen] = played(options_of(tmp_path), ["pwd; t"])
    assert seen.observation == "/my app\nt b c"


def test_tests_of_another_interpreter_run_in_it(tmp_path: Path) -> None:
    test = "#!/usr/bin/env python3\nfrom pathlib import Path\nassert Path('out').exists()\n"
    harbor(tmp_path, test=test)
    *_, last = played(options_of(tmp_path), ["touch out", "submit"])
    assert last.reward == 1.0


def test_first_command_waits_for_the_health_check(tmp_path: Path) -> None:
    check = "[ -f /tmp/b ] || { [ -f /tmp/a ] && touch /tmp/b; touch /tmp/a; false; }"
    settings = f'[environment.healthcheck]\ncommand = "{check}"\ninterval_sec = 0.01\n'
    harbor(tmp_path, settings=settings)
    [seen] = played(options_of(tmp_path), ["ls /tmp"])
    assert seen.observation == "a\nb"
    harbor(tmp_path, settings=settings + "retries = 2\n")
    with pytest.raises(EnvFailure, match=r"healthcheck failed 2 times"):
        played(options_of(tmp_path), ["ls /tmp"])


def test_task_lowers_the_limits(tmp_path: Path) -> None:
    harbor(tmp_path, settings="[environment]\nstorage_mb = 1\nmemory_mb = 100000\n")
    [seen] = played(options_of(tmp_path), ["df -m --output=size . | tail -n 1"])
    assert seen.observation.strip() == "1"


def test_image_without_a_dockerfile_needs_containers(tmp_path: Path) -> None:
    harbor(tmp_path, settings='[environment]\ndocker_image = "img:1"\n')
    [line] = check(options_of(tmp_path))
    assert "environment.docker_image=img:1: bubblewrap runs no images" in line


def test_check_env_fails_for_a_solution_without_a_reward(tmp_path: Path) -> None:
    need_bubblewrap()
    task = harbor(tmp_path)
    (task / "solution").mkdir()
    for text, grade in (("echo right > out\n", None), ("echo wrong > out\n", Grade.FAIL)):
        (task / "solution" / "solve.sh").write_text(text, encoding="utf-8")
        with Driver(make_spec(options_of(tmp_path)), Style.COMPACT) as driver:
            plays = play_all(driver, ["tasks-train-0"])
        findings = check_players(driver.spec, plays)
        fails = [each for each in findings if each.grade is Grade.FAIL]
        assert [each.grade for each in fails] == ([grade] if grade else [])
        if fails:
            assert "reward 0 in 1 item; tasks-train-0 answers" in fails[0].text
