"""Laws of instances of SWE-bench, SWE-smith and R2E-Gym, with a repository of the test itself."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from common.config.envs import TerminalOptions
from common.errors import ConfigError
from envhub.envs.terminal.instances import DECIDE, load_instances
from envhub.envs.terminal.task_sets import load_task_set
from tests.envhub.envs.terminal.container_tasks import BASE
from tests.envhub.envs.terminal.test_containers import ENGINE, options_of, played, problem

IMAGE = f"localhost/longstride-swe-{os.getpid()}"
RIGHT = "def double(number):\n    return 2 * number\n"
WRONG = "def double(number):\n    return number + number + 1\n"
FIX = """diff --git a/code.py b/code.py
--- a/code.py
+++ b/code.py
@@ -1,2 +1,2 @@
 def double(number):
-    return number + number + 1
+    return 2 * number
"""
FAULT = """diff --git a/code.py b/code.py
--- a/code.py
+++ b/code.py
@@ -1,2 +1,2 @@
 def double(number):
-    return 2 * number
+    return number + number + 1
"""
TESTS = """diff --git a/test_code.py b/test_code.py
--- a/test_code.py
+++ b/test_code.py
@@ -1,2 +1,6 @@
 def test_old():
     assert True
+
+def test_double():
+    from code import double
+    assert double(4) == 8
"""
# A program with the words of pytest's summary: Debian's base image has Perl and no Python.
RUNNER = r"""#!/usr/bin/perl
my ($file) = grep { /\.py$/ } @ARGV; open(my $f, "<", $file) or die; local $/; my $text = <$f>;
open(my $c, "<", "code.py") or die; my $code = <$c>;
for my $name ($text =~ /def (test_\w+)/g) {
  my $ok = $name ne "test_double" || $code =~ /2 \* number/;
  print(($ok ? "PASSED" : "FAILED"), " $file\::$name", ($ok ? "" : " - assert"), "\n");
}
"""
DOCKERFILE = f"""FROM {BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends git mawk >/dev/null
COPY run /usr/local/bin/run-tests
COPY code.py test_code.py /testbed/
WORKDIR /testbed
RUN chmod 755 /usr/local/bin/run-tests && git config --global user.email a@b.c \\
 && git config --global user.name a && git init -q && git add . && git commit -qm first
"""
BENCH = {
    "instance_id": "me__repo-1",
    "repo": "me/repo",
    "base_commit": "HEAD",
    "problem_statement": "double(4) is 9.",
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": json.dumps(["test_code.py::test_double"]),
    "PASS_TO_PASS": json.dumps(["test_code.py::test_old"]),
    "test_cmd": "run-tests",
    "image_name": f"{IMAGE}:bench",
}
SMITH = {
    "instance_id": "me__repo.1.fault__x",
    "repo": "swesmith/me__repo.1",
    "patch": FAULT,
    "problem_statement": "double(4) is 9.",
    "FAIL_TO_PASS": ["test_code.py::test_double"],
    "PASS_TO_PASS": ["test_code.py::test_old"],
    "test_cmd": "run-tests",
    "image_name": f"{IMAGE}:smith",
}
GYM = {
    "repo_name": "repo",
    "commit_hash": "0123456789abcdef",
    "docker_image": f"{IMAGE}:gym",
    "problem_statement": "double(4) is 9.",
    "expected_output_json": json.dumps({"test_double": "PASSED", "test_old": "PASSED"}),
    "patch": FIX,
}
NEW_TEST = "def test_old():\n    assert True\n\ndef test_double():\n    assert double(4) == 8\n"
OLD_TEST = "def test_old():\n    assert True\n"
FORMS = {
    "bench": (BENCH, WRONG, OLD_TEST, ""),
    "smith": (SMITH, RIGHT, NEW_TEST, ""),
    "gym": (
        GYM,
        WRONG,
        OLD_TEST,
        "COPY test_code.py /r2e_tests/old.py\nCOPY tests.py /testbed/r2e_tests/test_1.py\n"
        "RUN echo 'run-tests r2e_tests/test_1.py' > /testbed/run_tests.sh\n",
    ),
}


@pytest.fixture(params=FORMS)
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the form of an instance, and a file with it, whose image is built."""
    if reason := problem():
        pytest.skip(reason)
    row, code, tests, more = FORMS[request.param]
    context = tmp_path / "image"
    context.mkdir()
    texts = {"run": RUNNER, "code.py": code, "test_code.py": tests, "tests.py": NEW_TEST}
    texts["Dockerfile"] = DOCKERFILE + more
    for name, text in texts.items():
        (context / name).write_text(text, encoding="utf-8")
    tag = f"{IMAGE}:{request.param}"
    built = subprocess.run(
        [ENGINE, "build", "-q", "-t", tag, str(context)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if built.returncode != 0:
        pytest.skip(f"the image cannot be built: {built.stderr[-300:]}")
    path = tmp_path / "instances.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    yield request.param, path
    subprocess.run([ENGINE, "rmi", "--force", tag], capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_instance_is_solved_only_by_its_patch(instance: tuple[str, Path]) -> None:
    _, path = instance
    first, (*_, solved) = played(options_of(path), [None, None])
    assert "double(4) is 9." in first
    assert "The work folder is /testbed." in first
    assert solved.reward == 1.0, solved.observation
    spoilt = "rm -f test_code.py; echo 'def test_double(): pass' > test_code.py"
    _, (*_, idle) = played(options_of(path), [spoilt, "submit"])
    assert idle.reward == 0.0, idle.observation


@pytest.mark.parametrize(
    ("log", "expected", "reward"),
    [
        # The lists of SWE-bench have names without what follows their first space.
        ("PASSED a.py::t[x or y]", "PASSED a.py::t[x", 1),
        ("PASSED a.py::t[x or y]\nFAILED a.py::t[x and y] - assert", "PASSED a.py::t[x", 0),
        ("PASSED a.py::t[1 - 2]", "PASSED a.py::t[1", 1),
        ("XFAIL a.py::t - not yet", "PASSED a.py::t", 1),
        ("XFAIL a.py::t", "PASSED a.py::t", 1),
        ("SKIPPED a.py::t", "PASSED a.py::t", 0),
        ("XPASS a.py::t", "PASSED a.py::t", 0),
        ("FAILED a.py::t - PASSED a.py::t", "PASSED a.py::t", 0),
        ("ERROR a.py::t - x", "PASSED a.py::t", 0),
        ("PASSED a.py::C::t[a - b]", "PASSED C.t[a - b]", 1),  # R2E-Gym has whole names.
        ("FAILED a.py::C::t[a] - x", "FAILED C.t[a]", 1),
        ("test_x (a.B) ... ok", "PASSED test_x (a.B)", 1),
        ("", "PASSED a.py::t", 0),
    ],
)
def test_log_is_decided_as_by_the_harness(
    tmp_path: Path, log: str, expected: str, reward: int
) -> None:
    (tmp_path / "expected.txt").write_text(f"{expected}\n", encoding="utf-8")
    (tmp_path / "log.txt").write_text(f"collected 2 items\n{log}\n", encoding="utf-8")
    script = DECIDE.replace("/tests/", f"{tmp_path}/").replace("/logs/verifier/", f"{tmp_path}/")
    subprocess.run(["sh", "-c", script], check=True, capture_output=True)
    assert (tmp_path / "reward.txt").read_text(encoding="utf-8") == f"{reward}\n"


def write(folder: Path, row: Mapping[str, object]) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    return path


def test_image_of_an_instance_has_the_name_of_the_benchmark(tmp_path: Path) -> None:
    row = {key: value for key, value in BENCH.items() if key != "image_name"}
    [task] = load_instances(write(tmp_path, {**row, "instance_id": "Org__repo-12"}), "key")
    assert task.image == "docker.io/swebench/sweb.eval.x86_64.org_1776_repo-12:latest"
    [task] = load_instances(write(tmp_path, {**SMITH, "image_name": "swesmith.x86_64.a"}), "key")
    assert task.image == "docker.io/swebench/swesmith.x86_64.a"


def test_tests_of_django_have_the_names_of_modules(tmp_path: Path) -> None:
    patch = TESTS.replace("test_code.py", "tests/forms/test_x.py")
    row = {**BENCH, "repo": "django/django", "test_patch": patch}
    [task] = load_instances(write(tmp_path, {k: v for k, v in row.items() if k != "test_cmd"}), "k")
    script = next(file.text for file in task.tests if file.name == "test.sh")
    assert "--parallel 1 forms.test_x > /tests/log.txt" in script


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "?"}, "row 0: no instance of SWE-bench"),
        ({k: v for k, v in BENCH.items() if k != "repo"}, "row 0: the field repo is missing"),
        ({**BENCH, "FAIL_TO_PASS": "x"}, "row 0: a field has a wrong type"),
    ],
)
def test_faulty_instance_is_named(tmp_path: Path, row: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_instances(write(tmp_path, row), "key")


def test_instances_need_a_sandbox_with_images(tmp_path: Path) -> None:
    path = str(write(tmp_path, BENCH))
    with pytest.raises(ConfigError, match="its instances have images; set envs"):
        load_task_set(
            "key", path, options=TerminalOptions(), has_images=False, has_containers=False
        )
