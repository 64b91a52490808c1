"""Laws of the programming problems: formats, answers, tests in the sandbox and their limits."""

import asyncio
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import CodeOptions, EnvsSection, SandboxOptions
from common.errors import ConfigError
from common.repository import ROOT
from envhub.env import StepResult, Style, UnknownItem
from envhub.envs.code.env import CodeEnv, check, code_of, load_problems, make_spec
from envhub.sandbox.interface import SandboxFailed
from tests.envhub.sandbox.boxes import OPTIONS, need_bubblewrap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MBPP = {
    "task_id": 1,
    "text": "Write a function double.",
    "code": "def double(n):\n    return 2 * n",
    "test_list": ["assert double(2) == 4", "assert double(-1) == -2", "assert double(0) == 0"],
    "test_setup_code": "",
}
SANITIZED = {  # The format of MBPP's sanitized set.
    "prompt": "Write a function root.",
    "code": "def root(n):\n    return math.sqrt(n)",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(root(9), 3)"],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(n: List[int]) -> int:\n    """Add."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(n)\n",
    "test": "def check(f):\n    assert f([1, 2]) == 3\n    assert f([]) == 0\n",
}


def options_of(folder: Path, records: Sequence[Any], **own: Any) -> EnvsSection:
    """Return the options of a file with these records."""
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    given = {"timeout_s": 60.0, "total_timeout_s": 120.0, "eval": "", **own}
    return EnvsSection(sandbox=OPTIONS, code=CodeOptions(train=str(path), **given))


def answered(options: EnvsSection, answer: str, item: int = 0) -> StepResult:
    """Return the result of an answer to a problem."""

    async def play() -> StepResult:
        env = make_spec(options).make(Style.COMPACT)
        assert isinstance(env, CodeEnv)
        await env.reset(f"problems-train-{item}", 0)
        return await env.step(answer)

    return asyncio.run(play())


@pytest.fixture
def mbpp(tmp_path: Path) -> EnvsSection:
    need_bubblewrap()
    return options_of(tmp_path, [MBPP], reward="share")


def test_answer_that_passes_all_tests_is_solved(mbpp: EnvsSection) -> None:
    result = answered(mbpp, "I double it.\n```python\ndef double(n):\n    return n + n\n```\nDone.")
    assert (result.reward, result.is_success, result.done) == (1.0, True, True)
    assert result.observation == "3 of 3 tests passed."


def test_reward_is_the_share_of_passed_tests(mbpp: EnvsSection, tmp_path: Path) -> None:
    wrong = "def double(n):\n    return n * n"  # Right for 2 and 0, wrong for -1.
    result = answered(mbpp, wrong)
    assert result.reward == pytest.approx(2 / 3)
    assert (result.is_success, result.metrics) == (
        False,
        {"tests_passed_frac": pytest.approx(2 / 3), "limit_reached": 0.0},
    )
    assert answered(options_of(tmp_path, [MBPP], reward="passed"), wrong).reward == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no code at all (",
        "import sys\ndef double(n): return 2 * n\nsys.exit(0)",
        "import os\ndef double(n): os._exit(0)",
        "import os, signal\ndef double(n): os.kill(os.getppid(), signal.SIGKILL)",
        "import builtins\ndef double(n): raise SystemExit",
        "print('0\\n1\\n2')\ndef double(n): return None",
        "def double(n):\n    return open('/tmp/given.json').read()",
        "x = '\ud800'",
    ],
)
def test_answer_without_a_solution_gives_no_reward(mbpp: EnvsSection, answer: str) -> None:
    result = answered(mbpp, answer)
    assert (result.reward, result.done) == (0.0, True)


def test_tests_that_did_not_begin_give_no_reward(tmp_path: Path) -> None:
    need_bubblewrap()
    options = options_of(tmp_path, [MBPP], total_timeout_s=1e-6)
    with pytest.raises(SandboxFailed, match=r"no test began \(the timeout limit\)"):
        answered(options, MBPP["code"])


ANY = """
class Any_(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __abs__(self): return self
    def __sub__(self, other): return self
    def __lt__(self, other): return True
    def __hash__(self): return 0
def double(n): return Any_()
"""


# Answers that deceive their tests, by what they use. `double` of 0 may be right.
CHEATS = {
    "list": """
class E(list):
    def __eq__(self, o): return True
def double(n): return E()
""",
    "frames": """
import sys
def double(n):
    f = sys._getframe()
    while f:
        for v in list(f.f_locals.values()):
            if 'assert' in repr(v): return 4
        f = f.f_back
    return 2 * n if n == 99 else None
""",
    "collector": """
import gc
def double(n):
    texts = [o for o in gc.get_objects() if isinstance(o, dict)]
    return 4 if any('assert double' in str(o.get('tests')) for o in texts) else None
""",
    "builtins": """
import builtins
builtins.AssertionError = None
builtins.all = lambda x: True
def double(n): return 0 if n else None
""",
    "json": """
import json
json.dumps = lambda m: '{"value": true}'
def double(n): return 1
""",
    "reference": """
import json
json.dumps = lambda m: '{"value": {"remote": 0}}'
def double(n): return 1
""",
    "descriptors": """
import sys, os
for fd in range(3, 99):
    try: os.write(fd, b'1' * 99)
    except OSError: pass
def double(n): return 1
""",
    "memory": """
import os, glob
for path in glob.glob('/proc/[0-9]*'):
    for name in ('mem', 'fd/1', 'environ'):
        try:
            if b'assert' in open(path + '/' + name, 'rb').read(1 << 20): answer = 4
        except OSError: pass
def double(n): return answer
""",
    "signals": """
import os, signal
for pid in range(1, 400):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
def double(n): return 2 * n if n == 99 else 0
""",
    "object": ANY.replace("BASE", "object"),
    "integer": ANY.replace("BASE", "int"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_answer_that_deceives_the_tests_is_not_solved(mbpp: EnvsSection, cheat: str) -> None:
    assert answered(mbpp, CHEATS[cheat]).reward in (0.0, pytest.approx(1 / 3))


READER = """
import os
result = 'closed'
for pid in filter(str.isdigit, os.listdir('/proc')):
    if int(pid) in (os.getpid(), 1): continue
    for name in ('mem', 'environ', 'fd/0', 'fd/3'):
        try:
            open(f'/proc/{pid}/{name}', 'rb').close()
            result = name
        except OSError: pass
def double(n):
    return 2 * n if result == 'closed' else result
"""


def test_memory_of_the_tests_is_closed_to_the_program(mbpp: EnvsSection) -> None:
    assert answered(mbpp, READER).observation == "3 of 3 tests passed."


KINDS = {
    "text": "Write functions.",
    "code": """
import math
from math import isclose
from collections import Counter


class Node:
    def __init__(self, value):
        self.value = value
        self.next = None


def last(node):
    while node.next is not None:
        node = node.next
    return node.value


def sort(values):
    values.sort()


def count(text):
    return Counter(text)


def sum(a, b):
    return a + b


def each(f, values):
    return map(f, values)


def fails(n):
    raise ValueError('no')


def kinds():
    return (1, [2.5, None], {'a': {1, 2}}, b'x', 10**30, 1 + 2j, float('inf'))
""",
    "test_setup_code": "a = Node(1)\na.next = Node(2)",
    "test_list": [
        "assert last(a) == 2",
        "a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]",
        "assert count('aab') == {'a': 2, 'b': 1} and isclose(1.0, 1.0) and math.pi > 3",
        "assert sum(2, 3) == 5",
        "assert list(each(lambda n: n + 1, [1, 2])) == [2, 3]",
        """
try:
    fails(1)
except ValueError as error:
    assert str(error) == 'no'
else:
    assert 0
""",
        "assert kinds() == (1, [2.5, None], {'a': {1, 2}}, b'x', 10**30, 1 + 2j, float('inf'))",
    ],
}


def test_values_functions_and_objects_pass_between_test_and_program(tmp_path: Path) -> None:
    need_bubblewrap()
    options = options_of(tmp_path, [KINDS])
    assert answered(options, KINDS["code"]).observation == "7 of 7 tests passed."


def test_time_limit_of_a_test_fails_only_that_test(tmp_path: Path) -> None:
    need_bubblewrap()
    options = options_of(tmp_path, [MBPP], reward="share", timeout_s=3.0)
    slow = "import time\ndef double(n):\n    while n < 0:\n        time.sleep(1)\n    return 2 * n"
    assert answered(options, slow).reward == pytest.approx(2 / 3)


def test_memory_limit_fails_the_tests_by_name(mbpp: EnvsSection) -> None:
    hog = "def double(n):\n    a = [bytearray(10 << 20) for _ in range(13)]\n    while 1: pass"
    result = answered(mbpp, hog)
    assert (result.reward, result.observation) == (
        0.0,
        "0 of 3 tests passed. The memory limit ended the tests.",
    )


@pytest.mark.parametrize("record", [MBPP, SANITIZED, HUMANEVAL])
def test_reference_solution_passes_in_each_format(record: dict[str, Any], tmp_path: Path) -> None:
    need_bubblewrap()
    options = options_of(tmp_path, [record])

    async def play() -> StepResult:
        env = make_spec(options).make(Style.COMPACT)
        assert isinstance(env, CodeEnv)
        await env.reset("problems-train-0", 0)
        expert = await env.expert_action()
        assert expert is not None
        return await env.step(expert)

    assert asyncio.run(play()).reward == 1.0


def test_humaneval_answer_may_be_the_body_or_the_function(tmp_path: Path) -> None:
    need_bubblewrap()
    options = options_of(tmp_path, [HUMANEVAL])
    assert answered(options, "```python\n    return sum(n)\n```").reward == 1.0
    whole = "```python\ndef total(n: List[int]) -> int:\n    return sum(n)\n```"
    assert answered(options, whole).reward == 1.0


def test_code_is_the_last_block_of_python() -> None:
    assert code_of("```sh\nls\n```\n```python\na = 1\n```\n```py\nb = 2\n```") == "b = 2\n"
    assert code_of("```\na = 1") == "a = 1"
    assert code_of("a = 1") == "a = 1"


DOCSTRING = 'def f():\n    """\n    ```\n    x\n    ```\n    """\n    return 1\n'
STRING = "s = '''\n```sh\nls\n```\n'''\nt = \"```\"  # it's ```\n"


@pytest.mark.parametrize("code", [DOCSTRING, STRING])
@pytest.mark.parametrize(
    "answer", ["```python\n{}```", "It's\n~~~py\n{}~~~\n", "````\n{}````", "```python\n{}\n#"]
)
def test_fences_in_strings_are_parts_of_the_code(answer: str, code: str) -> None:
    assert code_of(answer.replace("{}", code)).rstrip("\n#") == code.rstrip()


def test_indented_block_loses_its_indent_only() -> None:
    assert code_of("1. Body:\n  ```python\n    return 1\n  ```") == "  return 1\n"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "?"}, "record 1: needs text (or prompt) and test_list as in MBPP"),
        ({**MBPP, "test_list": []}, "test_list is [], not a list of texts"),
        ({**MBPP, "text": 3}, "text is 3, not a text"),
        ({**HUMANEVAL, "entry_point": "a b"}, "entry_point is 'a b', not a name"),
        ({**HUMANEVAL, "test": 3}, "test is 3, not a text"),
    ],
)
def test_record_of_another_format_is_refused(record: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(options_of(tmp_path, [record]))
    assert words in str(caught.value)
    assert check(options_of(tmp_path, [record])) == [str(caught.value)]


def test_sandbox_that_cannot_start_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = options_of(tmp_path, [MBPP])
    assert "bubblewrap (bwrap) is missing" in check(options)[0]
    with pytest.raises(SandboxFailed, match="bwrap"):
        answered(options, "def double(n): return 2 * n")


def test_shipped_problems_have_right_solutions() -> None:
    options = CodeOptions()
    train = load_problems("envs.code.train", options.train)
    held_out = load_problems("envs.code.eval", options.eval)
    assert (len(train), len(held_out)) == (265, 100)
    assert not {each.solution for each in train} & {each.solution for each in held_out}
    for each in train + held_out:
        names: dict[str, Any] = {}
        for test in each.tests:
            exec(f"{each.solution}\n{test}", names)


def test_shipped_problems_come_from_their_script(tmp_path: Path) -> None:
    source = ROOT / "configs" / "data" / "make_code.py"
    scope = runpy.run_path(str(source))
    scope["write"](tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        shipped = (source.with_name("code") / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == shipped


def test_unknown_problem_is_refused(tmp_path: Path) -> None:
    options = options_of(tmp_path, [MBPP])
    object.__setattr__(options, "sandbox", SandboxOptions())
    env = make_spec(options).make(Style.COMPACT)
    assert isinstance(env, CodeEnv)
    with pytest.raises(UnknownItem):
        asyncio.run(env.reset("problems-train-1", 0))
