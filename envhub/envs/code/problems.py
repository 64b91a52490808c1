"""Programming problems in the formats of MBPP and HumanEval."""

import ast
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from envhub.envs.dataset.files import digest_of, files_of, find_path, read_records

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


def load_problems(key: str, given: str) -> list[CodeProblem]:
    """Return the problems of a file.

    Args:
        key: the setting that named the file.

    Raises: ConfigError: no such file, or a record is of neither format.
    """
    path = find_path(key, given)
    records = read_records(key, path, SPLITS[key])
    return [_problem(record, f"{key}={given}: record {n}") for n, record in enumerate(records, 1)]


def digest_of_problems(key: str, given: str) -> str:
    """Return the digest of the file's content."""
    return digest_of(files_of(key, find_path(key, given), SPLITS[key]))


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
