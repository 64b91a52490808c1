"""Programming problems: the code of one answer runs with the tests in a sandbox."""

import ast
import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.envs import CodeOptions, EnvsSection
from common.errors import ConfigError
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, parse_item
from envhub.envs.dataset.files import digest_of, files_of, find_data, read_records
from envhub.sandbox.backends import limits_of, make_backend, worker_bytes
from envhub.sandbox.interface import (
    CommandEnd,
    SandboxBackend,
    SandboxFailed,
    SandboxLimits,
    SandboxRequest,
)

OPENING = re.compile(
    r"^(?:(?P<indent>[ \t]*)|[^`\n]*(?=`))(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>\w*)[^`\n]*$",
    re.M,
)
# A comment, a string, or a line that may end a block. Fences in strings are parts of the code.
TOKEN = re.compile(
    r"""\#.*|^[ \t]*(?P<fence>`{3,}|~{3,})[ \t\r]*$|[\"]{3}(?:[^\\]|\\[\s\S])*?[\"]{3}"""
    r"""|[']{3}(?:[^\\]|\\[\s\S])*?[']{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""",
    re.M,
)
CALLED = re.compile(r"\bassert\s+(?:not\s+)?\(?([A-Za-z_]\w*)\(")
SPLITS = {"envs.code.train": "train", "envs.code.eval": "test"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """One problem.

    Attributes:
        prompt: the text that the agent reads.
        head: code in front of an answer that does not define `entry_point` itself.
        setup: code before the tests, such as imports.
        tests: programs of which each one must end without an error after the answer's code.
        solution: reference code; None without one.
    """

    prompt: str
    head: str
    entry_point: str
    setup: str
    tests: tuple[str, ...]
    solution: str | None

    @property
    def tested(self) -> list[str]:
        """The functions and classes that an answer must define: those of the reference code."""
        if self.entry_point:
            return [self.entry_point]
        with contextlib.suppress(SyntaxError):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            body = ast.parse(self.solution or "").body
            names = [node.name for node in body if isinstance(node, kinds)]
            if names:
                return names
        return sorted({name for test in self.tests for name in CALLED.findall(test)})

    def program(self, answer: str) -> str:
        """Return the code of an answer, completed by the head of the problem if necessary."""
        code = code_of(answer)
        if not self.head or re.search(rf"^\s*def\s+{self.entry_point}\b", code, re.MULTILINE):
            imports = self.head.partition("def ")[0]
            return f"{imports}\n{code}" if self.head else code
        return f"{self.head.rstrip()}\n{code}"


def code_of(answer: str) -> str:
    """Return the last fenced block of Python of an answer, or else the whole answer."""
    blocks: list[str] = []
    at = 0
    while (opening := OPENING.search(answer, at)) is not None:
        content, at = _block(answer, opening)
        if opening["language"].lower() in PYTHON:
            indent = len(opening["indent"] or "")
            blocks.append(re.sub(rf"(?m)^[ \t]{{0,{indent}}}", "", content))
    return blocks[-1] if blocks else answer


def _block(answer: str, opening: re.Match[str]) -> tuple[str, int]:
    """Return the content of a block, and the place of its end."""
    fence = opening["fence"]
    start = min(opening.end() + 1, len(answer))
    for token in TOKEN.finditer(answer, start):
        if (token["fence"] or "").startswith(fence):
            return answer[start : token.start()], token.end()
    # The answer was cut, or its last line has code and the fence.
    return answer[start:].rstrip().removesuffix(fence), len(answer)


PYTHON = ("", "python", "python3", "py")


def load_problems(key: str, value: str) -> list[CodeProblem]:
    """Return the problems of a file.

    Args:
        key: the setting that named the file.

    Raises: ConfigError: no such file, or a record is of neither format.
    """
    path = find_data(key, value)
    records = read_records(key, path, SPLITS[key])
    return [_problem(record, f"{key}={value}: record {n}") for n, record in enumerate(records, 1)]


def digest_of_problems(key: str, value: str) -> str:
    """Return the digest of the file's content."""
    return digest_of(files_of(key, find_data(key, value), SPLITS[key]))


def _problem(record: Mapping[str, Any], where: str) -> CodeProblem:
    """Return the problem of a record in either format. Raises: ConfigError."""
    if "test_list" in record:
        return _of_mbpp(record, where)
    if "entry_point" in record and "test" in record:
        return _of_humaneval(record, where)
    raise ConfigError(
        f"{where}: needs text (or prompt) and test_list as in MBPP, or prompt, entry_point and"
        f" test as in HumanEval; it has {', '.join(record)}"
    )


def _of_mbpp(record: Mapping[str, Any], where: str) -> CodeProblem:
    """Return the problem of a record of MBPP. Raises: ConfigError."""
    text = record.get("text") or record.get("prompt")
    tests = record["test_list"]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: text is {text!r:.100}, not a text")
    is_list = isinstance(tests, Sequence) and not isinstance(tests, str)
    if not is_list or not tests or not all(isinstance(each, str) for each in tests):
        raise ConfigError(f"{where}: test_list is {tests!r:.100}, not a list of texts")
    imports = record.get("test_imports") or []
    setup = "\n".join([*imports, record.get("test_setup_code") or ""])
    return CodeProblem(
        prompt=f"{text.strip()}\nThe code must pass:\n" + "\n".join(tests),
        head="",
        entry_point="",
        setup=setup,
        tests=tuple(tests),
        solution=record.get("code"),
    )


def _of_humaneval(record: Mapping[str, Any], where: str) -> CodeProblem:
    """Return the problem of a record of HumanEval. Raises: ConfigError."""
    for name in ("prompt", "entry_point", "test"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise ConfigError(f"{where}: {name} is {record.get(name)!r:.100}, not a text")
    if not record["entry_point"].isidentifier():
        raise ConfigError(f"{where}: entry_point is {record['entry_point']!r:.100}, not a name")
    head = record["prompt"]
    solution = record.get("canonical_solution")
    return CodeProblem(
        prompt=f"Complete this function:\n```python\n{head.rstrip()}\n```",
        head=head,
        entry_point=record["entry_point"],
        setup="",
        tests=(f"{record['test']}\ncheck({record['entry_point']})",),
        solution=None if solution is None else f"{head}{solution}",
    )


SUBSET = "problems"
HARNESS = Path(__file__).with_name("harness.py")
PROGRAM = Path(__file__).with_name("program.py")
GIVEN = "/tmp/given.json"
MAX_CODE_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 1 << 20
MARGIN_S = 180.0  # Seconds of a step beyond the tests: start and end of the sandbox.
INSTRUCTION = "Solve the problem with a Python program. Answer with the code in a ```python block."


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """Everything that the episodes share."""

    problems: dict[str, list[CodeProblem]]  # By split.
    options: CodeOptions
    limits: SandboxLimits
    backend: SandboxBackend

    @property
    def subsets(self) -> dict[str, SubsetSpec]:
        """The only subset with its sizes."""
        sizes = {split: len(each) for split, each in self.problems.items()}
        spec = SubsetSpec(num_train=sizes["train"], num_test=sizes["test"], max_turns=1)
        return {SUBSET: spec}


class CodeEnv:
    """One problem with one answer. The reward is that of its tests."""

    def __init__(self, task: CodeTask) -> None:
        self._task = task
        self._problem: CodeProblem | None = None

    async def reset(self, item_id: str, seed: int) -> str:
        """Return the problem of an item. Raises: UnknownItem."""
        item = parse_item(item_id, self._task.subsets)
        self._problem = self._task.problems[item.split][item.index]
        return self._problem.prompt

    async def step(self, action: str) -> StepResult:
        """Run the tests of an answer and return its reward. Raises: SandboxFailed."""
        problem = self._problem
        if problem is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        self._problem = None
        program = problem.program(action).encode(errors="replace").decode()
        num_tests = len(problem.tests)
        if not program.strip() or len(program.encode()) > MAX_CODE_BYTES:
            return self._result("The answer has no code, or too much of it.", 0, num_tests, "")
        num_passed, limit = await self._run(problem, program)
        observation = f"{num_passed} of {num_tests} tests passed."
        if limit:
            observation += f" The {limit} limit ended the tests."
        return self._result(observation, num_passed, num_tests, limit)

    def _result(self, observation: str, num_passed: int, num_tests: int, limit: str) -> StepResult:
        """Return the end of the episode with the reward of the tests."""
        share = num_passed / num_tests
        is_solved = num_passed == num_tests
        return StepResult(
            observation=observation,
            reward=share if self._task.options.reward == "share" else float(is_solved),
            done=True,
            is_valid=not observation.startswith("The answer has no code"),
            is_success=is_solved,
            metrics={"tests_passed_frac": share, "limit_reached": float(bool(limit))},
        )

    async def _run(self, problem: CodeProblem, program: str) -> tuple[int, str]:
        """Return how many tests pass, and the limit that ended them; "" if none did.

        Raises: SandboxFailed: no test began, such as without Python in the image.
        """
        options = self._task.options
        mark = secrets.token_hex(16)
        message = {"program": program, "setup": problem.setup, "tests": problem.tests}
        message |= {"seconds": options.timeout_s, "mark": mark}
        message |= {"head": problem.head, "entry_point": problem.entry_point}
        message |= {"tested": problem.tested}
        message |= {"runner": PROGRAM.read_text(encoding="utf-8")}
        sandbox = await self._task.backend.create(SandboxRequest(limits=self._task.limits))
        try:
            await sandbox.write(GIVEN, json.dumps(message).encode())
            harness = HARNESS.read_text(encoding="utf-8")
            result = await sandbox.exec(
                ["python3", "-I", "-c", harness, GIVEN],
                timeout_s=options.total_timeout_s,
                max_output_bytes=MAX_OUTPUT_BYTES,
            )
        finally:
            await sandbox.delete()
        lines = result.text.splitlines()
        if f"{mark} begins" not in lines:
            how = f"exit code {result.exit_code}"
            if result.ended_by is not CommandEnd.EXIT:
                how = f"the {result.ended_by.value} limit"
            raise SandboxFailed(f"no test began ({how}): {result.text.strip()[-300:]}")
        expected = {f"{mark} {index}" for index in range(len(problem.tests))}
        passed = expected.intersection(lines)
        limit = "" if result.ended_by is CommandEnd.EXIT else result.ended_by.value
        return len(passed), limit

    async def valid_actions(self) -> list[str]:
        """Return an answer without a solution, as a sample of all texts."""
        return [] if self._problem is None else ["```python\npass\n```"]

    async def expert_action(self) -> str | None:
        """Return the reference solution; None if the problem has none."""
        if self._problem is None or self._problem.solution is None:
            return None
        return f"```python\n{self._problem.solution.strip()}\n```"

    async def render(self) -> str:
        """Return the problem as text."""
        return "" if self._problem is None else self._problem.prompt

    async def fingerprint(self) -> str:
        """Return a digest of the problem."""
        return hashlib.sha256(repr(self._problem).encode()).hexdigest()

    async def close(self) -> None:
        """Release nothing: a sandbox lives only during a step."""


def load_code_task(options: EnvsSection) -> CodeTask:
    """Return the problems and the sandbox. Raises: ConfigError."""
    code = options.code
    problems = {"train": load_problems("envs.code.train", code.train), "test": []}
    if code.eval:
        problems["test"] = load_problems("envs.code.eval", code.eval)
    return CodeTask(
        problems=problems,
        options=code,
        limits=limits_of(options.sandbox),
        backend=make_backend(options.sandbox),
    )


def check(options: EnvsSection) -> list[str]:
    """Return a line for each reason why the problems cannot be played here."""
    try:
        task = load_code_task(options)
    except ConfigError as error:
        return [str(error)]
    return [*filter(None, [task.backend.problem()])]


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of the problems. Raises: ConfigError."""
    task = load_code_task(options)
    code = options.code
    content = {"envs.code.train": digest_of_problems("envs.code.train", code.train)}
    if code.eval:
        content["envs.code.eval"] = digest_of_problems("envs.code.eval", code.eval)

    def make(_: Style) -> CodeEnv:
        return CodeEnv(task)

    return EnvSpec(
        name="code",
        subsets=task.subsets,
        instruction=dict.fromkeys(Style, INSTRUCTION),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=code.max_sessions,
        sessions_key="envs.code.max_sessions",
        worker_memory_bytes=worker_bytes(options.sandbox, code.max_sessions),
        step_timeout_s=code.total_timeout_s + MARGIN_S,
        takes_any_text=True,
        has_references=True,
        is_repeatable=False,  # A time limit depends on the machine's load.
        content=content,
    )
