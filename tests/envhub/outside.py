"""Small environments that misbehave on demand; the hub loads them by import path."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from common.host.guardian import MARKS
from envhub.env import (
    EnvFailure,
    EnvSpec,
    Isolation,
    Reward,
    StepResult,
    Style,
    SubsetSpec,
    TaskSpec,
    parse_item,
)
from envhub.hosting.episodes import CLOSE_TIMEOUT_S

PAY = {"overpay": 2.0, "pay nothing": float("nan"), "end": 1.0}
SUBSETS = {"any": SubsetSpec(num_train=10, num_test=10, max_turns=5)}
closed: list[str] = []  # last actions of the episodes of this process that were closed
stopped: list[str] = []
meeting: list["FaultyEnv"] = []
has_begun = threading.Event()
loop_runs = threading.Event()


class FaultyEnv:
    """Counts its steps and obeys the action."""

    def __init__(self, style: Style) -> None:
        self.num_steps = 0
        self.last = ""
        self.held = b""

    def reset(self, item_id: str, seed: int) -> str:
        parse_item(item_id, SUBSETS)
        return f"begun in {os.getpid()}"

    def step(self, action: str) -> StepResult:
        self.last = action
        self._misbehave(action)
        self.num_steps += 1
        if action == "cut off":
            return StepResult(
                observation="cut off", reward=0.5, done=True, is_valid=True, is_truncated=True
            )
        return StepResult(
            observation=f"step {self.num_steps}" + " \ud83d" * (action == "half"),
            reward=PAY.get(action, 0.0),
            done=action == "end",
            is_valid=True,
            metrics={"speed": float("nan")} if action == "no speed" else None,
            facts={"speeds": [1.0, float("inf")]} if action == "no limit" else None,
        )

    def _misbehave(self, action: str) -> None:
        if action == "raise":
            raise KeyError("a bug in the environment")
        if action == "raise half":
            raise ValueError("a bug with \ude00")
        if action == "fail":
            raise EnvFailure("the machine behind it is down")
        if action == "slow":
            time.sleep(0.15)
        if action == "await the loop":
            has_begun.set()
            assert loop_runs.wait(8.0), "the step blocks the event loop"
        if action == "hang":
            time.sleep(60.0)
        if action == "meet":
            meeting.append(self)
            while len(meeting) < 2:
                time.sleep(0.01)
        if action == "exit":
            os._exit(3)
        if action == "grow":
            self.held = os.urandom(1) * (160 << 20)

    def valid_actions(self) -> list[str]:
        if self.last == "be odd":
            return [b"bytes"]  # type: ignore[list-item]
        return ["end", f"after {self.num_steps}"]

    def expert_action(self) -> str | None:
        if self.last == "trap":
            time.sleep(60.0)
        return None

    def render(self) -> str:
        return f"{self.num_steps} steps"

    def fingerprint(self) -> str:
        return "same"

    def close(self) -> None:
        if self.last == "close slowly":
            time.sleep(CLOSE_TIMEOUT_S + 0.5)
        closed.append(self.last)


class WaitingEnv(FaultyEnv):
    """The same with coroutines."""

    async def reset(self, item_id: str, seed: int) -> str:  # type: ignore[override]
        return super().reset(item_id, seed)

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        if action == "wait":
            await asyncio.sleep(60.0)
        if action == "pause":
            await asyncio.sleep(0.2)
        if action.startswith("pause after "):
            Path(action.removeprefix("pause after ")).touch()
            await asyncio.sleep(0.5)
        if action == "meet":
            meeting.append(self)
            while len(meeting) < 2:  # then its own step finds that both have come
                await asyncio.sleep(0.01)
        return super().step(action)

    async def valid_actions(self) -> list[str]:  # type: ignore[override]
        return super().valid_actions()

    async def expert_action(self) -> str | None:  # type: ignore[override]
        return None

    async def render(self) -> str:  # type: ignore[override]
        return super().render()

    async def fingerprint(self) -> str:  # type: ignore[override]
        return "same"

    async def close(self) -> None:  # type: ignore[override]
        super().close()


async def _stop() -> None:
    stopped.append("task")


def make_spec() -> EnvSpec:
    """Return the environment that lives in the hub's own thread."""
    tasks = {
        "Any": TaskSpec(
            scenario="Tests", subset="any", train=("any-train-1",), test=("any-test-2",)
        )
    }
    return EnvSpec(
        name="faulty",
        subsets=SUBSETS,
        instruction={Style.COMPACT: ""},
        make=FaultyEnv,
        tasks=tasks,
        step_timeout_s=60.0,
    )


def make_misnamed() -> EnvSpec:
    """Return an environment with an invalid subset name."""
    return replace(make_spec(), subsets={"half \ud83d": SUBSETS["any"]})


def make_task() -> EnvSpec:
    """Return the environment that lives in the hub's event loop."""
    return replace(
        make_spec(),
        name="waiting",
        make=WaitingEnv,
        isolation=Isolation.TASK,
        sessions_per_worker=64,
        step_timeout_s=None,
        stop=_stop,
    )


def make_worker() -> EnvSpec:
    """Return the environment that lives in two workers of two sessions each."""
    return replace(
        make_spec(),
        name="fragile",
        isolation=Isolation.WORKER,
        sessions_per_worker=2,
        max_workers=2,
        worker_memory_bytes=160 << 20,
    )


def make_async_worker() -> EnvSpec:
    """Return the environment of coroutines that lives in a worker."""
    return replace(make_worker(), name="async", make=WaitingEnv)


def make_unloadable() -> EnvSpec:
    """Return an environment that loads in the hub and not in a worker."""
    if MARKS in os.environ:
        raise RuntimeError("no libfoo.so here")
    return replace(make_worker(), name="unloadable")


class OddCallEnv(FaultyEnv):
    """Begins with a call of a tool whose argument is not finite."""

    def first_messages(self) -> list[dict[str, object]]:
        function = {"name": "wait", "arguments": {"s": float("inf")}}
        return [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]


def make_odd_call() -> EnvSpec:
    return replace(make_worker(), name="odd_call", make=OddCallEnv)


class SavingEnv(FaultyEnv):
    """Pays a tenth a step, and saves what its last action asks for."""

    def step(self, action: str) -> StepResult:
        self.last = action
        self.num_steps += 1
        done = self.num_steps == 10
        text = f"step {self.num_steps}"
        return StepResult(observation=text, reward=0.1, done=done, is_valid=True, state=text)

    def save(self) -> object:
        kinds = {"tuple": (1,), "number": {1: 1}, "nan": float("nan"), "bytes": b"1"}
        if self.last == "raise in save":
            raise KeyError("nothing to save")
        if self.last == "hang in save":
            time.sleep(60.0)
        pad = "x" * (2 << 20) if self.last == "large" else kinds.get(self.last)
        return {"num_steps": self.num_steps, "pad": pad}

    def load(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


class LateSavingEnv(SavingEnv):
    """The same with coroutines."""

    async def reset(self, item_id: str, seed: int) -> str:  # type: ignore[override]
        return super().reset(item_id, seed)

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        return super().step(action)

    async def save(self) -> object:  # type: ignore[override]
        return super().save()

    async def load(self, state: dict[str, int]) -> None:  # type: ignore[override]
        super().load(state)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


def make_saving() -> EnvSpec:
    """Return an environment with states, in a worker, whose rewards are summed."""
    return replace(make_worker(), name="saving", make=SavingEnv, reward=Reward.SUM)


def make_saving_task() -> EnvSpec:
    """Return the same in the hub's event loop."""
    return replace(make_task(), name="saving_task", make=LateSavingEnv, reward=Reward.SUM)
