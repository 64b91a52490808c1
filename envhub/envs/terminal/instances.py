"""Instances of SWE-bench, SWE-smith and R2E-Gym as tasks: an image, an issue, tests."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from envhub.envs.terminal.image import TaskFile
from envhub.envs.terminal.tasks import TerminalTask
from envhub.sandbox.interface import TESTS, ContainerSpec

FOLDER = "/testbed"
SUFFIXES = (".jsonl", ".json")
# Test commands of repositories whose tests pytest does not run, as SWE-bench's harness has them.
COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "bin/test -C --verbose",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
}
PYTEST = "python -m pytest -rA -p no:cacheprovider"
ACTIVATE = """
for f in /opt/miniconda3/bin/activate /testbed/.venv/bin/activate; do [ -f "$f" ] && . "$f"; done
command -v conda >/dev/null && conda activate testbed
cd /testbed
git config --global --add safe.directory '*'
"""
# Writes 1 if all of the expected lines, such as "PASSED a.py::b", are in the log, else 0. As in the
# harness of SWE-bench, names end at their first space, the last line of a name counts, and an
# expected failure is a success.
DECIDE = r"""
awk '
  FNR == NR { if ($0 != "") wanted[$0] = 1; next }
  { sub(/\r$/, "") }
  !/^PASSED / { sub(/ - .*$/, "") }
  /^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) / {
    seen[$0] = 1
    last[$2] = ($1 == "XFAIL") ? "PASSED" : $1
  }
  /^(PASSED|FAILED|ERROR|SKIPPED) .*::/ {
    status = $1; name = substr($0, index($0, "::") + 2); gsub("::", ".", name)
    seen[status " " name] = 1  # The names of R2E-Gym lack the file.
  }
  / \.\.\. ok$/ { sub(/ \.\.\. ok$/, ""); seen["PASSED " $0] = 1; next }
  / ok$/ { sub(/ ok$/, ""); seen["PASSED " $0] = 1 }
  END { for (line in wanted) {
          n++
          num = split(line, words, " ")
          if (line in seen || (num == 2 && last[words[2]] == words[1])) continue
          print "missing: " line
          missing = 1
        }
        print (n && !missing) ? 1 : 0 > "/logs/verifier/reward.txt" }
' /tests/expected.txt /tests/log.txt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweInstance:
    """An instance in the words of a task.

    Attributes:
        setup: commands that bring the repository into the state of the issue.
        prepare: commands before the tests, such as those that write the files of the tests.
        command: the command of the tests.
        expected: lines that the log must have, such as "PASSED a.py::b".
        patches: the patches that the tests need, by their names.
        solution: the reference solution as commands.
    """

    name: str
    image: str
    instruction: str
    setup: str
    prepare: str
    command: str
    expected: Sequence[str]
    patches: Mapping[str, str]
    solution: str


def is_file_of_instances(path: Path) -> bool:
    """Return whether a path is a file of instances, and no folder of tasks."""
    return path.is_file() and path.suffix in SUFFIXES


def load_instances(path: Path, where: str) -> list[TerminalTask]:
    """Return the tasks of a file of instances, in its order. Raises: ConfigError."""
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text) if path.suffix == ".json" else _lines(text)
        rows = list(rows)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where}: it has no instances, each a JSON object")
    return [_task(_read(row, f"{where}: row {number}")) for number, row in enumerate(rows)]


def _lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)


def _read(row: Mapping[str, Any], where: str) -> SweInstance:
    """Return an instance by its form. Raises: ConfigError: a field is missing."""
    try:
        if "expected_output_json" in row:
            return _r2e(row)
        if "test_patch" in row:
            return _bench(row)
        if "FAIL_TO_PASS" in row:
            return _smith(row)
    except KeyError as error:
        raise ConfigError(f"{where}: the field {error.args[0]} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: a field has a wrong type: {error}") from error
    raise ConfigError(
        f"{where}: no instance of SWE-bench (test_patch), SWE-smith (FAIL_TO_PASS) or R2E-Gym"
        " (expected_output_json)"
    )


def _names(value: Any) -> list[str]:
    """Return the names of tests, which SWE-bench has as a text of JSON."""
    return [str(name) for name in (json.loads(value) if isinstance(value, str) else value)]


def _passed(row: Mapping[str, Any]) -> list[str]:
    names = [*_names(row["FAIL_TO_PASS"]), *_names(row.get("PASS_TO_PASS") or [])]
    return [f"PASSED {name}" for name in names]


def _files_of(patch: str) -> list[str]:
    """Return the files that a patch changes or makes."""
    lines = [line for line in patch.splitlines() if line.startswith("+++ b/")]
    return list(dict.fromkeys(line.removeprefix("+++ b/").split("\t")[0] for line in lines))


def _bench(row: Mapping[str, Any]) -> SweInstance:
    """Return an instance of SWE-bench: tests come as a patch, the solution is a patch."""
    name = str(row["instance_id"])
    default = f"docker.io/swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    files = _files_of(row["test_patch"])
    tests = [file for file in files if not file.endswith((".txt", ".json", ".cfg", ".ini"))]
    command = str(row.get("test_cmd") or COMMANDS.get(str(row["repo"]), PYTEST))
    if str(row["repo"]) == "django/django":
        modules = [file.removeprefix("tests/").removesuffix(".py") for file in tests]
        tests = [module.replace("/", ".") for module in modules]
    base = shlex.quote(str(row["base_commit"]))
    checkout = f"git checkout -f {base} -- {shlex.join(files)} 2>/dev/null\n" if files else ""
    return SweInstance(
        name=name,
        image=str(row.get("image_name") or row.get("docker_image") or default),
        instruction=str(row["problem_statement"]),
        setup="",
        prepare=f"{checkout}git apply --whitespace=nowarn /tests/test.patch || exit 126",
        command=f"{command} {shlex.join(tests)}",
        expected=_passed(row),
        patches={"test.patch": row["test_patch"]},
        solution=_apply(row.get("patch") or "", ""),
    )


def _smith(row: Mapping[str, Any]) -> SweInstance:
    """Return an instance of SWE-smith: its patch makes the fault, so the solution undoes it."""
    name = str(row["instance_id"])
    image = str(row["image_name"])
    if "/" not in image:
        image = f"docker.io/swebench/{image}"
    names = [line.removeprefix("PASSED ") for line in _passed(row)]
    files = list(dict.fromkeys(test.split("::")[0] for test in names))
    branch = shlex.quote(name)
    # The branch of an instance has the fault, and no files of its tests in the last commit.
    setup = f"git checkout -qf {branch} 2>/dev/null || git apply /tmp/fault.patch"
    tests = f"git checkout -qf {branch}~1 -- {shlex.join(files)} 2>/dev/null || true"
    return SweInstance(
        name=name,
        image=image,
        instruction=str(row["problem_statement"]),
        setup=_written("/tmp/fault.patch", row["patch"]) + setup,
        prepare=tests,
        command=f"{row.get('test_cmd') or PYTEST} {shlex.join(files)}",
        expected=_passed(row),
        patches={},
        solution=_apply(row["patch"], "--reverse"),
    )


def _r2e(row: Mapping[str, Any]) -> SweInstance:
    """Return an instance of R2E-Gym: its image has the tests, and each has an expected status."""
    expected = json.loads(row["expected_output_json"])
    return SweInstance(
        name=f"{row['repo_name']}-{str(row['commit_hash'])[:12]}",
        image=str(row["docker_image"]),
        instruction=str(row["problem_statement"]),
        # The tests are out of the agent's reach until the end.
        setup="mkdir -p /root/r2e && for f in run_tests.sh r2e_tests; do"
        " for d in /testbed /; do [ -e $d/$f ] && mv $d/$f /root/r2e/; done; done; true",
        prepare="rm -rf run_tests.sh r2e_tests; cp -r /root/r2e/. .; "
        "[ -e run_tests.sh ] || exit 126",
        command="bash run_tests.sh",
        expected=[f"{status} {name}" for name, status in expected.items() if name],
        patches={},
        solution=_apply(str(row.get("patch") or ""), ""),
    )


def _written(path: str, text: str) -> str:
    """Return the commands that write a text."""
    end = "END_OF_PATCH"
    return f"cat > {path} <<'{end}'\n{text.rstrip(chr(10))}\n{end}\n"


def _apply(patch: str, options: str) -> str:
    """Return the commands that apply a patch to the repository; "" without one."""
    if not patch.strip():
        return ""
    write = _written("/tmp/solution.patch", patch)
    return f"cd {FOLDER}\n{write}git apply --whitespace=nowarn {options} /tmp/solution.patch"


def _task(instance: SweInstance) -> TerminalTask:
    """Return the task of an instance."""
    script = f"{ACTIVATE}{instance.prepare}\n{instance.command} > /tests/log.txt 2>&1\n{DECIDE}"
    texts = {
        "test.sh": script,
        "expected.txt": "\n".join(instance.expected) + "\n",
        **instance.patches,
    }
    files = [
        TaskFile(source=None, target=f"{TESTS}/{name}", mode=0o644, text=text)
        for name, text in texts.items()
    ]
    return TerminalTask(
        name=instance.name,
        instruction=instance.instruction.strip(),
        folder=FOLDER,
        work="",
        files=(),
        tests=tuple(files),
        command=("bash", "/tests/test.sh"),
        needs_pytest=False,
        variables={},
        test_variables={},
        test_timeout_s=None,
        agent_timeout_s=None,
        memory_bytes=None,
        disk_bytes=None,
        solution=instance.solution or None,
        image=instance.image,
        healthcheck=None,
        container=ContainerSpec(image=instance.image),
        setup=f"{ACTIVATE}{instance.setup}" if instance.setup else "",
    )
