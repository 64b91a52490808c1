"""What the tests of the environments share: episodes with types, experts, other interpreters."""

import json
import os
import subprocess
import sys
from typing import Any, cast

from common.repository import ROOT
from envhub.env import Env, EnvSpec, StepResult, Style


def new_episode(spec: EnvSpec, style: Style = Style.COMPACT) -> Env:
    """Return an episode of an environment that needs no event loop."""
    return cast(Env, spec.make(style))


def item_of(spec: EnvSpec, number: int) -> str:
    """Return the item of one of AgentGym's numbers."""
    assert spec.from_agentgym is not None
    return spec.from_agentgym(number)


def expert_results(env: Env) -> list[StepResult]:
    """Return what the expert's actions led to, until the episode ended or it knew no way."""
    return [env.step(action) for action in iter(env.expert_action, None)]


def elsewhere(module: str, expression: str, *, hash_seed: int) -> Any:
    """Return what an expression over a module's names is worth in another interpreter."""
    code = f"import json; from {module} import *; print(json.dumps({expression}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join(sys.path),
            "PYTHONHASHSEED": str(hash_seed),
        },
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout.splitlines()[-1])
