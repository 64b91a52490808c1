"""How each command of the documentation is checked. The first rule that matches holds.

A command that no rule matches fails: every command on a page is checked.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class How(StrEnum):
    """The check of a command.

    run: it is run as it stands. dry: with --dry-run. config: its configuration is loaded and
    checked. parse: only the words of the command line are. make: `make -n`. collect: pytest's
    --collect-only. none: nothing, on this machine.
    """

    RUN = "run"
    DRY = "dry"
    CONFIG = "config"
    PARSE = "parse"
    MAKE = "make"
    COLLECT = "collect"
    NONE = "none"


class Rule(NamedTuple):
    """The pattern of a command, its check and, if it is not run, the reason."""

    pattern: str
    how: How
    reason: str = ""


PY = r"(\.venv/bin/)?python run\.py "
# Packages of extras, and datasets of the Hub.
OF_OTHERS = r"(reasoning_gym:|textarena:|openai/gsm8k|\bbfcl\b|\btextworld\b|\bsmollm2-)"
RULES = (
    Rule(
        PY + rf"(train |--config ).*{OF_OTHERS}", How.CONFIG, "wants a package; tests/envhub/envs"
    ),
    Rule(PY + rf".*{OF_OTHERS}", How.PARSE, "wants a package; tests/envhub/envs"),
    Rule(PY + r".*(mcp|verifiers):", How.PARSE, "wants its package; tests/envhub/interop"),
    Rule(PY + r"(--help|--version|help|envs|new-env|check-env|play)\b", How.RUN),
    Rule(PY + r"journal .*--format", How.PARSE, "wants a policy's run; tests/tools/exchange"),
    Rule(PY + r".*copy_to=s3:", How.CONFIG, "wants s3fs; tests/tools/copies"),
    Rule(PY + r"journal .*(copy|fetch) ", How.PARSE, "wants a store; tests/tools/copies"),
    Rule(PY + r"(show|replay|journal|status)\b", How.RUN),
    Rule(PY + r"doctor --quick", How.RUN),
    Rule(PY + r"doctor\b", How.PARSE, "compiles a kernel, a minute; --quick is run"),
    Rule(PY + r".*--join", How.PARSE, "wants another machine; tests/common/join and end_to_end"),
    Rule(PY + r"dashboard( |$)", How.PARSE, "serves until it is stopped; tests/tools/dashboard"),
    Rule(PY + r"bench\b", How.PARSE, "measures for minutes; each suite has its own test"),
    Rule(PY + r"recompute\b", How.PARSE, "wants a run's weights; tests/tools/recompute"),
    Rule(PY + r"report\b", How.PARSE, "wants finished runs; tests/tools/report"),
    Rule(PY + r"set\b", How.PARSE, "wants a run that works; tests/scheduler"),
    Rule(PY + r"revoke\b", How.PARSE, "wants a run's keys; tests/common/wire/access"),
    Rule(PY + r"merge\b", How.PARSE, "wants adapters; tests/tools/offline"),
    Rule(PY + r"gather\b", How.PARSE, "wants a learner on several nodes; tests/tools/offline"),
    Rule(
        PY + r"(sft|dpo) model\.path=FOLDER .*=(rows\.jsonl|pairs\.jsonl|runs/quickstart)$",
        How.CONFIG,
        "reads a file of the reader's; tests/tools/offline",
    ),
    Rule(
        PY + r".*--config (code|terminal|harness)",
        How.CONFIG,
        "starts sandboxes; tests/envhub/envs",
    ),
    Rule(
        PY + r".*examples/mini-swe-agent",
        How.CONFIG,
        "starts sandboxes; end_to_end/test_agents_of_others",
    ),
    Rule(
        r"python3 -m venv '?~/|'?~/[\w-]+/bin/pip'? install ",
        How.NONE,
        "end_to_end/test_agents_of_others",
    ),
    Rule(r"export '?AGENT_PYTHON=", How.NONE, "changes the reader's own shell"),
    Rule(
        PY + r".*teacher\.path=runs/", How.CONFIG, "wants a run's weights; end_to_end/test_teacher"
    ),
    Rule(
        PY + r".*log\.to=\[wandb,tensorboard", How.CONFIG, "wants a package; learner/test_trackers"
    ),
    Rule(PY + r".*launcher=ray", How.CONFIG, "asks a Ray cluster; end_to_end/test_run_on_ray"),
    Rule(
        PY + r".*actor\.engine_args\.",
        How.CONFIG,
        "imports vLLM; tests/actor/engine/test_arguments",
    ),
    Rule(PY + r".*HuggingFaceTB/", How.CONFIG, "downloads a model; end_to_end/test_pretrained.py"),
    Rule(PY + r"eval --config agentgym-paper-tables$", How.CONFIG, "wants a model's weights"),
    Rule(PY + r"train env\.dialect=", How.CONFIG, "asks a server of others; envhub/interop"),
    Rule(PY + r"train .envhub\.envs=\[gymnasium", How.CONFIG, "a game of the reader's"),
    Rule(r"\.venv/bin/python -m pip install (-c|--no-deps) ", How.NONE, "changes this environment"),
    Rule(r"python3 -m pip install ", How.NONE, "tests/test_wheel.py installs the wheel"),
    Rule(r"UV_PROJECT_ENVIRONMENT=\S+ uv sync ", How.NONE, "installs gigabytes"),
    Rule(r"longstride ", How.NONE, "tests/test_wheel.py runs the script"),
    Rule(r"pip install (trl|uv)", How.NONE, "tests/envhub/interop does, elsewhere"),
    Rule(r"python docs/examples/trl_|vf-eval ", How.NONE, "tests/envhub/interop runs it"),
    Rule(PY + r"simulate\b", How.PARSE, "plays for a minute; tests/tools/simulator"),
    Rule(PY + r"actor( |$)", How.PARSE, "joins a run that goes on; tests/end_to_end"),
    Rule(PY, How.DRY, "trains or serves for minutes, on GPUs or a cluster"),
    Rule(r"make ", How.MAKE, "installs, or runs for minutes"),
    Rule(r"\.venv/bin/python -m pytest ", How.COLLECT, "the suite runs it"),
    Rule(r"python -m tests\.envhub\.agentgym\.parity ", How.NONE, "wants a clone of AgentGym"),
    Rule(r"source \.venv/bin/activate", How.NONE, "changes the reader's own shell"),
    Rule(r"cp 'docs/daemons/.* systemctl daemon-reload|systemctl ", How.NONE, "wants systemd"),
    Rule(r"sbatch ", How.NONE, "wants Slurm; tests/tools/launch/test_daemons.py runs the script"),
)

# Packages whose blocks are only compiled.
FOREIGN = {
    "longstride": "tests/tools/api/test_script.py trains with it",
    "openai": "tests/actor/engine/test_openai_app.py sends such requests",
    "openenv": "tests/envhub/interop runs it, in an environment of its own",
}


def rule_of(command: str) -> Rule | None:
    """Return the rule that checks a command, or None."""
    return next((rule for rule in RULES if re.match(rule.pattern, command)), None)
