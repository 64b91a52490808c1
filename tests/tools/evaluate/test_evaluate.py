"""Laws of the command `eval`, with a real small hub and a real small endpoint."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer

from actor.policy import PolicySection
from common.config.actor import ActorSection
from common.config.envs import BabyaiOptions, DatasetOptions, EnvsSection, TerminalOptions
from common.config.eval import EvalSplit
from common.config.model import ModelSection
from common.config.scheduler import SchedulerSection
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.store.run_dir import RunDir
from learner.journal.journal import read_journal
from tests.actor.toy_servers import ToyEndpoint, ToyHub, serve
from tests.configs import edited
from tools.evaluate.config import EvalConfig, EvalItems, EvalOptions
from tools.evaluate.evaluate import (
    OPERATIONAL,
    describe_policy,
    digest_of,
    digest_of_envs,
    fetch_listed,
    run,
)
from tools.evaluate.play import PlannedEpisode
from tools.evaluate.settings import check_policy


@dataclass
class Stage:
    """A hub, an endpoint and a run directory."""

    root: Path
    hub: ToyHub = field(default_factory=ToyHub)
    endpoint: ToyEndpoint = field(default_factory=ToyEndpoint)
    output: str = ""
    hub_url: str = ""
    endpoint_url: str = ""

    def config(self, *, k: int = 1, model: str = "toy-1", **fields: Any) -> EvalConfig:
        policy = PolicySection(
            url=f"{self.endpoint_url}/v1", model=model, backoff_s=0.01, max_tries=2
        )
        return EvalConfig(
            model=ModelSection(path="unset"),
            tasks=[TaskSection(env="toy", subset="a")],
            scheduler=SchedulerSection(max_attempts=2),
            actor=ActorSection(env_timeout_s=10.0),
            eval=EvalOptions(k=k, **fields),
            policy=policy,
        )

    def evaluate(self, cfg: EvalConfig, numbers: list[int]) -> int:
        episodes = [
            PlannedEpisode(
                episode_id=f"toy/a-test-{number}/3.{sample}",
                env="toy",
                item_id=f"a-test-{number}",
                seed=sample,
                horizon=3,
            )
            for sample in range(cfg.eval.k)
            for number in numbers
        ]
        run_dir = RunDir(root=self.root)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = run(cfg, run_dir, episodes, hub_url=self.hub_url, token="")
        self.output = output.getvalue()
        return code

    @property
    def entries(self) -> list[dict[str, Any]]:
        return json.loads((self.root / "eval.json").read_text(encoding="utf-8"))["entries"]


@contextlib.contextmanager
def stage(root: Path) -> Iterator[Stage]:
    made = Stage(root=root)
    with serve(made.hub.app()) as hub_url, serve(made.endpoint.app()) as endpoint_url:
        made.hub_url, made.endpoint_url = hub_url, endpoint_url
        yield made


def test_samples_are_scored_written_and_printed(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        s.endpoint.script = ["wait"] * 6  # The first two episodes make no progress.
        cfg = s.config(k=2)
        cfg = edited(cfg, {"policy.max_concurrent": 1})
        assert s.evaluate(cfg, [0, 1]) == 0
        overall = s.entries[0]["overall"]
    assert (overall["num_items"], overall["num_episodes"], overall["num_failed"]) == (2, 4, 0)
    assert overall["avg_at_k"]["mean"] == 0.5  # sample 0 of both failed, sample 1 solved both
    assert overall["pass_at"]["1"]["mean"] == 0.5
    assert overall["pass_at"]["2"]["mean"] == 1.0
    assert overall["score"]["mean"] == 0.5
    assert s.output == (tmp_path / "eval.md").read_text(encoding="utf-8") + "\n"
    assert "| toy-1 | avg@2 | 50.00 [" in s.output


def test_second_evaluation_plays_only_missing_episodes(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        assert s.evaluate(s.config(), [0, 1]) == 0
        assert s.evaluate(s.config(), [0, 1, 2]) == 0
        assert s.hub.opened.count("a-test-0") == s.hub.opened.count("a-test-2") == 1
        assert s.entries[0]["overall"]["num_episodes"] == 3
        assert len(s.entries) == 1
    assert len(list(read_journal(tmp_path / "eval" / "journal"))) == 3


def test_failed_episode_is_reported_separately_and_retried(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        assert s.evaluate(s.config(max_failed_frac=0.5), [0, 9]) == 0
        overall = s.entries[0]["overall"]
        assert (overall["num_episodes"], overall["num_failed"]) == (1, 1)
        assert overall["failures"] == {"env_error": 1}
        assert overall["success"]["mean"] == 1.0  # the failure is no zero
        assert "1 (env_error 1)" in s.output
        num_before = len(s.hub.opened)
        s.evaluate(s.config(max_failed_frac=0.5), [0, 9])
        assert s.hub.opened[num_before:] == ["a-test-9"] * 2


def test_too_many_failures_exit_1_with_table(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        assert s.evaluate(s.config(max_failed_frac=0.1), [0, 9]) == 1
        assert s.entries[0]["overall"]["num_failed"] == 1


def test_silent_endpoint_exits_1_without_a_score(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        s.endpoint.script = [503] * 100
        assert s.evaluate(s.config(), [0]) == 1
        overall = s.entries[0]["overall"]
    assert (overall["success"]["mean"], overall["failures"]) == (None, {"aborted": 1})


def test_policies_share_one_table_but_no_episodes(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        s.evaluate(s.config(model="one"), [0])
        s.evaluate(s.config(model="two", label="Two | big"), [0])
        assert [entry["label"] for entry in s.entries] == ["one", "Two | big"]
    text = (tmp_path / "eval.md").read_text(encoding="utf-8")
    assert s.hub.opened == ["a-test-0"] * 2
    assert "| one | success | 100.00 [20.7, 100.0] |" in text
    assert "| Two / big | success |" in text


def test_digest_of_an_endpoint_changes_with_sampling_settings(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        first = s.config()

    def digest(**edits: Any) -> str:
        cfg = edited(first, {f"policy.{key}": value for key, value in edits.items()})
        return digest_of(describe_policy(cfg.policy, cfg.model, cfg.actor, style="compact"))

    assert digest() != digest(temperature=0.3)
    assert digest() == digest(max_tries=9)


def _engine_digest(model: ModelSection, actor: ActorSection) -> str:
    return digest_of(describe_policy(PolicySection(), model, actor, style="compact"))


@pytest.mark.parametrize(
    "options",
    [
        {"branch_turns": 2},
        {"branch_instruction": "Never branch."},
        {"summary_request": "Reply with one word."},
        {"engine_args": {"quantization": "fp8"}},
        {"context_turns": 2},
        {"reflect_every": 3},
        {"max_model_len": 1024},
    ],
    ids=str,
)
def test_digest_changes_with_options_of_episodes(options: dict[str, Any], tmp_path: Path) -> None:
    model = ModelSection(path=str(tmp_path))
    assert _engine_digest(model, ActorSection(**options)) != _engine_digest(model, ActorSection())


def test_digest_ignores_operational_options(tmp_path: Path) -> None:
    assert {field.name for field in fields(ActorSection)} > OPERATIONAL
    model = ModelSection(path=str(tmp_path))
    actor = ActorSection(max_concurrent=3, env_timeout_s=9.0, num_actors=4)
    assert _engine_digest(model, actor) == _engine_digest(model, ActorSection())


@pytest.mark.parametrize("is_option", [False, True])
def test_digest_changes_with_the_text_of_a_template(is_option: bool, tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    model = ModelSection(path=str(tmp_path / "model"), chat_template=str(path))
    model = model if is_option else ModelSection(path=str(tmp_path))
    path.write_text("{{ messages }}", encoding="utf-8")
    before = _engine_digest(model, ActorSection())
    path.write_text("{{ messages }} changed", encoding="utf-8")
    assert _engine_digest(model, ActorSection()) != before


def test_digest_of_environments_covers_options_and_files(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("one", encoding="utf-8")
    envs = EnvsSection(dataset=DatasetOptions(eval=str(path)), plugins={"mine": "a=1"})
    before = digest_of_envs(envs)
    assert before == digest_of_envs(replace(envs, dataset=replace(envs.dataset, max_sessions=3)))
    assert before != digest_of_envs(replace(envs, babyai=BabyaiOptions(shaped_reward=True)))
    assert before != digest_of_envs(replace(envs, plugins={"mine": "a=2"}))
    path.write_text("two", encoding="utf-8")
    assert before != digest_of_envs(envs)


def test_digest_of_environments_covers_folders_functions_and_descriptions(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "one" / "instruction.md"
    graders = tmp_path / "grade.py"
    description = tmp_path / "calculator.yaml"
    task.parent.mkdir(parents=True)
    rewards = [f"{graders}:right", {f"{graders}:right": 1.0}]
    sections = [EnvsSection(dataset=DatasetOptions(reward=each)) for each in rewards]
    sections += [EnvsSection(terminal=TerminalOptions(train=str(task.parents[1]))), EnvsSection()]

    def digests() -> list[str]:
        return [digest_of_envs(each, ["maze", f"mcp:{description}"]) for each in sections]

    for path in (task, graders, description):
        path.write_text("one", encoding="utf-8")
    before = digests()
    assert len(set(before)) == len(before)
    assert digests() == before
    graders.write_text("two", encoding="utf-8")
    assert [a == b for a, b in zip(before, digests(), strict=True)] == [False, False, True, True]
    before = digests()
    task.write_text("changed", encoding="utf-8")
    assert [a == b for a, b in zip(before, digests(), strict=True)] == [True, True, False, True]
    before = digests()
    description.write_text("two", encoding="utf-8")
    assert not set(before) & set(digests())


def test_other_settings_of_environments_are_played_anew(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        cfg = s.config()
        assert s.evaluate(cfg, [0]) == 0
        assert s.evaluate(edited(cfg, {"envs.babyai.shaped_reward": True}), [0]) == 0
        first, second = s.entries
    assert s.hub.opened == ["a-test-0"] * 2
    assert first["digest"] != second["digest"]
    assert all(f"| toy-1 {row['digest']} | success |" in s.output for row in (first, second))


def test_splits_have_rows_of_their_own(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        s.evaluate(s.config(), [0])
        s.evaluate(s.config(split=EvalSplit.VALIDATION), [1])
        s.evaluate(s.config(), [0])
        assert [(row["split"], row["tasks"]) for row in s.entries] == [
            ("test", ["toy/a"]),
            ("validation", ["toy/a"]),
        ]
    assert "| toy-1 | success |" in s.output
    assert "| toy-1 (validation) | success |" in s.output


def test_hub_provides_item_lists_and_notes(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        listed = fetch_listed(s.config(items=EvalItems.TASKS), hub_url=s.hub_url, token="")
        assert listed.items == {"toy": ["a-test-2", "a-test-5"]}
        assert (listed.turns, listed.notes) == ({}, {"toy": "our toys"})
        assert fetch_listed(s.config(), hub_url=s.hub_url, token="").items == {}
        paper = fetch_listed(s.config(items=EvalItems.PAPER), hub_url=s.hub_url, token="")
        assert (paper.items, paper.turns) == ({"toy": ["a-test-4"]}, {"toy": 7})
        assert paper.notes == {"toy": "not theirs"}


def test_mismatched_tokenizer_and_model_are_refused(repository: Path, tmp_path: Path) -> None:
    source = repository / "configs" / "policies" / "tiny"
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors")
    for name in names:
        (tmp_path / name).symlink_to(source / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tasks = [TaskSection(env="toy", subset="easy")]
    cfg = EvalConfig(model=ModelSection(path=str(tmp_path)), tasks=tasks)
    check_policy(cfg)
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "vocab_size": 100}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"model\.path=.*: the tokenizer has token id \d+"):
        check_policy(cfg)


def test_added_token_above_the_last_row_is_accepted(repository: Path, tmp_path: Path) -> None:
    source = repository / "configs" / "policies" / "tiny"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(source / name)
    written = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    tokenizer = AutoTokenizer.from_pretrained(source)
    num_rows = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokenizer.add_tokens([AddedToken(f"<image-{i}>", special=True) for i in range(num_rows)])
    tokenizer.save_pretrained(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == written
    assert len(tokenizer) > num_rows
    tasks = [TaskSection(env="toy", subset="easy")]
    check_policy(EvalConfig(model=ModelSection(path=str(tmp_path)), tasks=tasks))


def test_evaluation_of_nothing_is_refused() -> None:
    tasks = [TaskSection(env="toy", subset="easy")]
    with pytest.raises(ConfigError, match=r"tasks=\[\]"):
        check_policy(EvalConfig())
    with pytest.raises(ConfigError, match=r"eval\.num_items=0"):
        check_policy(EvalConfig(tasks=tasks, eval=EvalOptions(num_items=0)))
