"""Laws of the episode that is tried before a run starts."""

import os
from pathlib import Path

import psutil
import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import TrialFailed
from common.store.run_dir import RunDir
from tools.author.trial import _last, try_episodes
from tools.offline.config import SftConfig
from tools.offline.sft import collect_and_imitate

REWARDS = """
import os
import time


def right(completion, answer):
    return completion == answer


def wrong(completion):
    return [1, 2, 3]


def key(record):
    return record["nope"]


def ends(completion):
    os._exit(3)
"""
ENVIRONMENT = """
import os
import time

from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec


class Env:
    def reset(self, item_id, seed):
        {reset}
        return "the door is closed"

    def step(self, action):
        {step}
        return StepResult(observation="it opens", reward=1.0, done=True, is_valid=True)

    def valid_actions(self):
        return ["open"]

    def expert_action(self):
        return "open"

    def render(self):
        return ""

    def fingerprint(self):
        return ""

    def close(self):
        pass


def make_spec():
    return EnvSpec(
        name="door",
        subsets={{"all": SubsetSpec(num_train=2, num_test=1, max_turns=3)}},
        instruction=dict.fromkeys(Style, "Open the door."),
        make=lambda style: Env(),
        isolation=Isolation.WORKER,
        step_timeout_s=2.0,
    )
"""


def _dataset(tmp_path: Path, reward: str) -> RunConfig:
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 3, encoding="utf-8")
    (tmp_path / "own.py").write_text(REWARDS, encoding="utf-8")
    overrides = [f"data.train={tmp_path}/q.jsonl", "data.eval_size=1"]
    return load_config("dataset", [*overrides, f"reward={tmp_path}/own.py:{reward}"])


def _door(tmp_path: Path, *, reset: str = "pass", step: str = "pass") -> RunConfig:
    return load_config("smoke", _overrides(tmp_path, reset=reset, step=step))


def _overrides(tmp_path: Path, *, reset: str = "pass", step: str = "pass") -> list[str]:
    path = tmp_path / "door.py"
    path.write_text(ENVIRONMENT.format(reset=reset, step=step), encoding="utf-8")
    return ["tasks=[{env: door, subset: all}]", f"envhub.envs=['{path}:make_spec']"]


@pytest.mark.slow
def test_trial_returns_the_first_prompt_of_each_task(tmp_path: Path) -> None:
    (prompt,) = try_episodes(_dataset(tmp_path, "right"))
    assert [each["content"] for each in prompt.messages] == ["1+1?"]
    (page,) = try_episodes(_door(tmp_path))
    assert (page.instruction, page.messages[0]["content"], page.may_be_cut) == (
        "Open the door.",
        "the door is closed",
        True,
    )
    (built_in,) = try_episodes(load_config("smoke", []))
    assert built_in.env == "babyai"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "words"),
    [("wrong", "which is not a number"), ("key", "KeyError: 'nope'"), ("ends", "failed on record")],
)
def test_mistake_in_a_reward_names_function_and_record(
    tmp_path: Path, reward: str, words: str
) -> None:
    with pytest.raises(TrialFailed) as failure:
        try_episodes(_dataset(tmp_path, reward))
    text = str(failure.value)
    assert words in text
    assert f"reward {reward} failed on record" in text
    assert "q.jsonl" in text
    assert f"own.py:{reward}" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("reset", "raise FileNotFoundError('no levels')", r"FileNotFoundError: no levels \(.*door"),
        ("step", "return None", "'NoneType' object has no attribute 'reward'"),
        ("reset", "os._exit(3)", r"reset ended its process: exit code 3"),
        ("reset", "time.sleep(60)", r"item all-train-0\): reset took longer than 2 s"),
        ("step", "os.kill(os.getpid(), 9)", r"step ended its process: killed by SIGKILL"),
    ],
)
def test_mistake_in_an_environment_names_the_call(
    tmp_path: Path, place: str, code: str, words: str
) -> None:
    with pytest.raises(TrialFailed, match=words):
        try_episodes(_door(tmp_path, **{place: code}))


@pytest.mark.slow
def test_trial_leaves_no_process(tmp_path: Path) -> None:
    sleep = ["sleep", f"{60_000 + os.getpid()}"]  # Other tests of this machine have another one.
    started = f"import subprocess; subprocess.Popen({sleep}, start_new_session=True)"
    try_episodes(_door(tmp_path, reset=started))
    commands = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert sleep not in commands


def test_event_that_is_written_in_part_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert _last(path) == {}
    first, second = '{"doing": "a"}', '{"prompts": [{"env": "b"}]}'
    for end in range(len(second) + 1):
        path.write_text(f"{first}\n{second[:end]}", encoding="utf-8")
        assert _last(path) == {"doing": "a"}
        path.write_text(second[:end], encoding="utf-8")
        assert _last(path) == {}
    path.write_text(f"{first}\n{second}\n", encoding="utf-8")
    assert _last(path) == {"prompts": [{"env": "b"}]}


@pytest.mark.slow
def test_demonstration_that_fails_names_the_call_and_the_log(tmp_path: Path) -> None:
    overrides = [
        "sft.num_demonstrations=2",
        "sft.expert_subsets=[]",
        f"run.dir={tmp_path}",
        "run.name=run",
    ]
    overrides += _overrides(tmp_path, reset="raise KeyError('nope')")
    cfg = load_config("tiny", overrides, schema=SftConfig)
    run_dir = RunDir(root=tmp_path / "run")
    with pytest.raises(TrialFailed, match="KeyError: 'nope'") as failure:
        collect_and_imitate(cfg, run_dir)
    (log,) = run_dir.root.rglob("envhub.log")
    assert str(failure.value).endswith(f"; the log is {log}")
    assert "raise KeyError" in log.read_text(encoding="utf-8")
