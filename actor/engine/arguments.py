"""Check of `actor.engine_args` against vLLM's own declaration of its arguments.

An import of vLLM takes seconds and hundreds of MB. So the check before a start is a process of its
own, `python -m actor.engine.arguments`. It reads the arguments from stdin as JSON, and the last
line of its output is the first problem, or empty.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

from common.errors import ConfigError
from common.repository import ROOT
from common.text import near_hint

logger = logging.getLogger(__name__)

CHECK_S = 300.0  # Seconds for a process to import vLLM and to check the arguments.


def check_engine_args(arguments: dict[str, Any]) -> None:
    """Check arguments in a process of its own; without arguments nothing is started.

    Raises: ConfigError: vLLM has no such argument, or its value has a wrong type.
    """
    if not arguments:
        return
    if importlib.util.find_spec("vllm") is None:
        logger.warning("vLLM is not installed here, so actor.engine_args is checked by the actor")
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "actor.engine.arguments"],
            input=json.dumps(arguments, default=str),
            cwd=ROOT,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CHECK_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"actor.engine_args: vLLM was not imported within {CHECK_S:g} s to check them"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        end = " ".join(done.stderr.splitlines()[-1:])
        raise ConfigError(f"actor.engine_args: vLLM could not be imported to check them: {end}")
    if lines[-1]:
        raise ConfigError(lines[-1])


def as_declared(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the types that vLLM declares: enums, sets and its configurations.

    It imports vLLM.

    Raises: ConfigError: vLLM has no such argument, or its value has a wrong type.
    """
    if not arguments:
        return {}
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    declared = {field.name: field.type for field in fields(AsyncEngineArgs) if field.name[0] != "_"}
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        shown = f"actor.engine_args.{name}={json.dumps(value, default=str):.200}: vLLM"
        shown = f"{shown} {vllm.__version__}"
        if name not in declared:
            hint = near_hint(name, declared, form=str) or "; `vllm serve --help` lists them"
            raise ConfigError(f"{shown} has no such argument{hint}")
        try:
            values[name] = typed(value, declared[name])
        except ValueError as error:
            raise ConfigError(f"{shown} refuses the value: {error}") from error
    return values


def typed(value: Any, kind: Any) -> Any:
    """Return a value as a type, by pydantic's strict rules for JSON. Enums accept names, too.

    A type by name (a text) and a type without a schema accept every value.

    Raises: ValueError: the value is not of the type.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

    names = _enum_names(kind)
    if isinstance(value, str) and names:
        if value.upper() in names:
            return names[value.upper()]
        if not {str, value} & {*get_args(kind), *(each.value for each in names.values())}:
            hint = near_hint(value, names, form=str).removeprefix("; ")
            text = hint.replace("nearest", "nearest value") or f"there are {', '.join(names)}"
            raise ValueError(text)
    if isinstance(kind, str):
        return value
    try:
        try:
            adapter = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticSchemaGenerationError:
            return value
        except PydanticUserError:  # The type has a configuration of its own.
            adapter = TypeAdapter(kind)
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        texts = dict.fromkeys(each["msg"] for each in error.errors())
        raise ValueError(" ".join("; or ".join(texts).split())) from error


def _enum_names(kind: Any) -> dict[str, Enum]:
    """Return the members of the enums in a type, by their names in upper case."""
    enums = [each for each in (kind, *get_args(kind)) if isinstance(each, type)]
    members = [m for each in enums if issubclass(each, Enum) for m in each.__members__.items()]
    return {name.upper(): member for name, member in members}


def main() -> None:
    """Check the arguments on standard input, and print the problem, or an empty line."""
    problem = ""
    try:
        as_declared(json.load(sys.stdin))
    except ConfigError as error:
        problem = " ".join(str(error).split())
    sys.stdout.write(f"\n{problem}\n")


if __name__ == "__main__":
    main()
