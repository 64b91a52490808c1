"""Laws of loading a configuration."""

import re
from pathlib import Path

import pytest

from actor.policy import PolicyConfig
from common.config.actor import ContextKind
from common.config.algorithm import Baseline
from common.config.learner import PartialEpisodes, WeightsTransport
from common.config.live import with_values
from common.config.load import (
    config_as_yaml,
    list_configs,
    load_config,
    style_of_model,
    with_base,
    without_secrets,
    word_with_base,
)
from common.config.train import TrainMode
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_start import save_config
from tools.offline.config import SftConfig

USUAL = {"quickstart", "smoke", "tiny", "textcraft-qwen7b", "code", "selfplay-nim", "teacher"}
MODEL = "model.path=/weights"


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(overrides: list[str], config: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_hold_when_nothing_is_given() -> None:
    cfg = load_config(None, [MODEL])
    assert (cfg.run.name, cfg.learner.lr, cfg.groups.size) == ("quickstart", 1e-6, 8)


def test_words_that_yaml_reads_as_booleans_name_members() -> None:
    cfg = load_config(None, [MODEL, "learner.partial_episodes=off"])
    assert cfg.learner.partial_episodes is PartialEpisodes.OFF
    with pytest.raises(ConfigError, match="partial_episodes=true: expects one of off"):
        load_config(None, [MODEL, "learner.partial_episodes=true"])


def test_hub_accepts_every_samplable_action() -> None:
    sizes = ["actor.max_model_len=1000000", "actor.max_turn_tokens=65537"]
    told = error_of([MODEL, *sizes])
    assert told.startswith(
        "envhub.max_action_mib=16: must be at least 17: actor.max_turn_tokens=65537"
    )
    enough = load_config(None, [MODEL, *sizes, "envhub.max_action_mib=17"])
    assert enough.envhub.max_action_mib == 17
    told = error_of([MODEL, sizes[0], "actor.max_turn_tokens=200000"])
    assert told.startswith(
        "actor.max_turn_tokens=200000: can sample 49 MiB, but an action has at most 48"
    )


def test_override_beats_file_and_file_beats_default(tmp_path: Path) -> None:
    text = "model: {path: m}\nlearner: {lr: 2e-4, beta1: 0.8}\n"
    cfg = load_config(write(tmp_path, "a", text), ["learner.lr=3e-4"])
    assert (cfg.learner.lr, cfg.learner.beta1, cfg.learner.beta2) == (3e-4, 0.8, 0.95)


def test_config_file_inherits_from_its_named_default(tmp_path: Path) -> None:
    write(tmp_path, "a", "model: {path: m}\ntrain: {num_steps: 7}\nhorizon: {stages: [3, 5]}\n")
    config = write(tmp_path, "b", "defaults: a\nhorizon: {stages: [4]}\n")
    cfg = load_config(config, [])
    assert (cfg.train.num_steps, cfg.horizon.stages, cfg.run.name) == (7, [4], "b")


def test_circular_config_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", "defaults: b\n")
    config = write(tmp_path, "b", "defaults: a\n")
    assert "returns to this file" in error_of([], config)


def test_enum_is_given_by_its_value() -> None:
    overrides = [MODEL, "train.mode=sync", "algorithm.baseline=group_mean"]
    cfg = load_config(None, overrides)
    assert (cfg.train.mode, cfg.algorithm.baseline) == (TrainMode.SYNC, Baseline.GROUP_MEAN)


def test_text_is_taken_as_it_is_written() -> None:
    cfg = load_config(None, [MODEL, "run.name=007", "actor.name=on"])
    assert (cfg.run.name, cfg.actor.name) == ("007", "on")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('"A text."', "A text."),
        ("'it''s'", "it's"),
        ('"a\\nb"', "a\nb"),
        ('"a" and "b"', '"a" and "b"'),
        ('"', '"'),
        ('say "a"', 'say "a"'),
    ],
)
def test_quotes_around_a_whole_text_are_taken_off(raw: str, text: str) -> None:
    cfg = load_config(None, [MODEL, f"data.system={raw}"])
    assert cfg.envs.dataset.system == text
    assert with_values(cfg, {"data.system": raw}).envs.dataset.system == text


@pytest.mark.parametrize(("size", "min_size"), [(1, 1), (2, 2), (4, 4), (8, 4), (64, 4)])
def test_default_of_min_size_follows_size(size: int, min_size: int) -> None:
    words = ["model.path=x", "algorithm.advantage=reinforce_pp", f"groups.size={size}"]
    assert load_config(None, words).groups.min_size == min_size


def test_one_field_of_one_task_is_overridable() -> None:
    cfg = load_config("quickstart", ["tasks[0].weight=0.5", "tasks.1.weight=0"])
    untouched = load_config("quickstart", []).tasks[2].weight
    assert [task.weight for task in cfg.tasks[:3]] == [0.5, 0.0, untouched]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.lr=abc", "learner.lr=abc: expects a number"),
        ("actor.num_actors=1.5", "actor.num_actors=1.5: expects a whole number"),
        ("log.live=maybe", "log.live=maybe: expects true or false"),
        ("train.mode=fast", "train.mode=fast: expects one of async, sync"),
        ("horizon.stages=[1,a]", "horizon.stages[1]=a: expects a whole number"),
        ("groups.size=null", "groups.size=null: expects a whole number"),
        ("learnr.lr=1e-4", "learnr.lr=1e-4: no such key; the nearest is learner.lr"),
        ("learner.lrr=1", "learner.lrr=1: no such key; the nearest is learner.lr"),
        ("lr=1", "lr=1: no such key; the nearest is learner.lr or learner.critic.lr"),
        ("zzqx=1", "zzqx=1: no such key; `python run.py help` lists the sections"),
        ("zzqx.lr=1", "zzqx.lr=1: no such key; the nearest is "),
        ("groups.qqqq=1", "groups.qqqq=1: no such key; groups has the keys size, per_step"),
        ("learner.qqqq=1", "no such key; `python run.py help learner` lists the keys of this"),
        ("learner.lora.qqqq=1", "no such key; learner.lora has the keys rank, alpha"),
        ("data.qqqq=1", "data.qqqq=1: no such key; data has the keys train, eval"),
        ("data.path=1", "data.path=1: no such key; data has the keys train, eval"),
        ("data.path=1", "model.path is a key of another section"),
        ("env=textcraft", "env=textcraft: expects a section with url, dialect"),
        ("tasks[99].weight=1", "tasks[99].weight=1: tasks has 9 entries"),
        ("horizon.per_env.maze.stages[0]=5", "horizon.per_env.maze.stages has 0 entries"),
        ("tasks=[{env: a, subset: b, wieght: 2}]", "tasks[0].wieght=2: no such key"),
        ("tasks=[{env: a}]", "tasks[0].subset is not set"),
        ("tasks=[{env: a, subset: b}, {env: a, subset: b}]", "tasks='a/b': is listed twice"),
        ("learner=3", "learner=3: expects a section"),
        ("learner.lr", "learner.lr: an override is key=value"),
        ("groups.size=0", "groups.size=0: must be in [1, 4096]"),
        ("log.live=[1", "not valid YAML"),
    ],
)
def test_error_names_key_value_and_expectation(override: str, words: str) -> None:
    assert words in error_of([override], "quickstart")


def test_text_in_place_of_a_section_is_its_kind(tmp_path: Path) -> None:
    text = "defaults: smoke\ncurriculum: my_code:items\n"
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert load_config(str(tmp_path / "mine.yaml"), []).curriculum.kind == "my_code:items"
    cfg = load_config("smoke", ["horizon=linear", "horizon.stages=[2,4]", "curriculum=m:f"])
    assert (cfg.horizon.kind, cfg.horizon.stages, cfg.curriculum.kind) == ("linear", [2, 4], "m:f")
    with pytest.raises(ConfigError, match=r"curriculum\.kind=all: expects one of horizon"):
        load_config("smoke", ["curriculum=all"])
    with pytest.raises(ConfigError, match=r"learner=fast: expects a section with num_nodes"):
        load_config("smoke", ["learner=fast"])


def test_key_given_twice_is_refused() -> None:
    assert "given twice" in error_of([MODEL, "learner.lr=1", "learner.lr=2"])


def test_missing_value_is_named() -> None:
    assert "model.path is not set" in error_of([])


def test_value_that_refers_to_a_missing_one_is_named() -> None:
    told = error_of(["groups.size=${model.path}"])
    assert told.startswith("groups.size is not set: give groups.size=")


def test_value_may_refer_to_a_key_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "16")
    words = [
        "learner.lr=${learner.critic.lr}",
        "groups.size=${oc.env:SIZE}",
        "run.name=a${run.seed}",
    ]
    cfg = load_config(None, [MODEL, *words])
    assert (cfg.learner.lr, cfg.groups.size, cfg.run.name) == (1e-5, 16, "a0")
    assert error_of([MODEL, "run.name=${a.b}"]).startswith("run.name: Interpolation key")


def test_map_keeps_its_entries_beside_a_new_one() -> None:
    words = ["actor.engine_args={a: 1}", "actor.engine_args.b.c=2"]
    cfg = load_config(None, [MODEL, *words])
    assert cfg.actor.engine_args == {"a": 1, "b": {"c": 2}}


def test_task_gets_its_first_configured_environment(tmp_path: Path) -> None:
    config = write(tmp_path, "a", "tasks: [{env: 'webarena|minisites', subset: CMS}]\n")
    assert load_config(config, [MODEL]).tasks[0].env == "minisites"
    site = "envs.webarena.gitlab=http://h:1"
    assert load_config(config, [MODEL, site]).tasks[0].env == "webarena"


def test_unknown_config_error_lists_existing_ones() -> None:
    message = error_of([], "quikstart")
    assert "--config quikstart" in message
    assert "nearest is quickstart" in message
    assert all(name in message for name in list_configs())


def test_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "a", "learner:\n  lrr: 1\n")
    assert f"{config}: learner.lrr=1" in error_of([], config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", " line 2: not valid YAML"),
        ("just words", ": just words=null: no such key"),
        ("5", ": expects sections at the top, not 5"),
        ("- a", ": expects sections at the top, not ['a']"),
        ("run: {name: a}\nrun: {name: b}\n", " line 2: not valid YAML: found duplicate key run"),
        ("learner:\n  lr: 1\n  lr: 2\n", " line 3: not valid YAML: found duplicate key lr"),
        (
            "defaults: /etc/passwd",
            ": defaults=/etc/passwd: expects the name, without .yaml, of a file",
        ),
        ("defaults: [a]", ": defaults=['a']: expects the name, without .yaml, of a file"),
        ("defaults: nosuch", ": defaults=nosuch: expects the name, without .yaml, of a file"),
        ("run: {name: \udcff}", ": cannot be read as UTF-8 text"),
    ],
)
def test_broken_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert error_of([MODEL], str(path)).startswith(f"{path}{words}")


def test_override_may_add_keys_beyond_the_files() -> None:
    cfg = load_config(None, [MODEL, "horizon.per_env.maze.every_steps=3"])
    assert cfg.horizon.policy("maze").every_steps == 3


def test_override_applies_to_values_of_earlier_overrides() -> None:
    tasks = "tasks=[{env: a, subset: b}, {env: a, subset: c}]"
    overrides = [MODEL, tasks, "tasks[1].weight=3", "horizon.per_env.a.stages=[3]"]
    cfg = load_config(None, overrides)
    assert [task.weight for task in cfg.tasks] == [1.0, 3.0]
    assert cfg.horizon.policy("a").stages == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.long)])
def test_shipped_config_survives_saving_and_loading(tmp_path: Path, are_all: bool) -> None:
    names = list_configs()
    assert set(names) >= USUAL
    for name in names if are_all else USUAL:
        cfg = load_config(name, [MODEL])
        assert cfg.run.name == name
        save_config(cfg, tmp_path / "deep" / "config.yaml")
        assert load_config(str(tmp_path / "deep" / "config.yaml"), []) == cfg


def test_no_value_leaks_into_the_next_load(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("tasks: [{env: babyai, subset: GoToLocal}]\n", encoding="utf-8")
    plain = load_config(str(path), [MODEL])
    more = ["tasks.0.subset=Open", "learner.lr=0.5", "horizon.per_env.babyai.kind=fixed"]
    changed = load_config(str(path), [MODEL, *more])
    assert (changed.tasks[0].subset, changed.learner.lr) == ("Open", 0.5)
    assert load_config(str(path), [MODEL]) == plain
    path.write_text("tasks: [{env: babyai, subset: Open}]\n", encoding="utf-8")
    assert load_config(str(path), [MODEL]).tasks[0].subset == "Open"


def test_list_of_enums_survives_saving_and_loading(tmp_path: Path) -> None:
    cfg = load_config(None, [MODEL, "sft.contexts=[full,fold]"], schema=SftConfig)
    assert cfg.sft.contexts == [ContextKind.FULL, ContextKind.FOLD]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [MODEL, "sft.contexts=[whole]"], schema=SftConfig)
    wrong = str(caught.value)
    assert "sft.contexts" in wrong
    assert "full, window, summary, fold, subagent" in wrong
    save_config(cfg, tmp_path / "saved.yaml")
    saved = str(tmp_path / "saved.yaml")
    assert load_config(saved, [], schema=SftConfig) == cfg


def test_config_file_is_private_and_display_redacted(tmp_path: Path) -> None:
    secrets = ["envhub.token=s3cret", "envhub.url=http://user:s3cret@10.0.0.1:1"]
    cfg = load_config(None, ["model.path=m", *secrets])
    assert "s3cret" not in config_as_yaml(without_secrets(cfg))
    save_config(cfg, tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert load_config(str(tmp_path / "config.yaml"), []).envhub == cfg.envhub


@pytest.mark.parametrize(
    ("overrides", "ranks", "local"),
    [
        ([], 1, 1),
        (["learner.num_nodes=3"], 3, 1),
        (["learner.num_nodes=2", "learner.ranks_per_node=4"], 8, 4),
        (["learner.ranks_per_node=4"], 4, 4),
        (["learner.num_nodes=2", "learner.num_ranks=6"], 6, 3),
        (["learner.num_nodes=2", "learner.num_gpus=6"], 6, 3),
    ],
)
def test_ranks_are_spread_over_the_nodes(overrides: list[str], ranks: int, local: int) -> None:
    learner = load_config(None, [MODEL, *overrides]).learner
    assert (learner.num_ranks, learner.local_ranks) == (ranks, local)


def test_gpus_of_all_engines_give_the_number_of_actors() -> None:
    gpus = ["actor.num_gpus=8", "actor.engines_per_process=2", "actor.tensor_parallel_size=2"]
    actor = load_config(None, [MODEL, *gpus]).actor
    assert (actor.num_actors, actor.num_processes, actor.num_engines) == (2, 2, 4)
    words = "(actor.num_actors=3) x actor.engines_per_process=2 x actor.tensor_parallel_size=2 = 12"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(None, [MODEL, *gpus, "actor.num_actors=3"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["num_nodes=2", "num_ranks=3"], "num_ranks=3: must be a multiple of learner.num_nodes=2"),
        (
            ["num_nodes=2", "num_ranks=8", "ranks_per_node=2"],
            "ranks_per_node=2: must be 0 or learner.num_ranks / learner.num_nodes = 4",
        ),
        (["num_nodes=0"], "num_nodes=0: must be"),
        (
            ["num_nodes=6", "shard_nodes=4"],
            "shard_nodes=4: must be 0 or a divisor of learner.num_nodes=6",
        ),
        (
            ["num_ranks=6", "sequence_ranks=4"],
            "sequence_ranks=4: must be a divisor of 6, the number of ranks on each node",
        ),
        (
            ["num_nodes=2", "num_ranks=4", "sequence_ranks=4"],
            "sequence_ranks=4: must be a divisor of 2, the number of ranks on each node",
        ),
        (
            ["num_ranks=6", "expert_ranks=4"],
            "expert_ranks=4: must be a divisor of learner.num_ranks=6",
        ),
        (["expert_ranks=2"], "expert_ranks=2: must be a divisor of learner.num_ranks=1"),
        (
            ["num_ranks=2", "expert_ranks=2", "offload=optimizer"],
            "expert_ranks=2: must be 1 with learner.offload=optimizer",
        ),
        (
            ["num_ranks=2", "sequence_ranks=2", "layout=padded"],
            "layout='padded': must be packed or auto with sequence_ranks > 1",
        ),
    ],
)
def test_uneven_ranks_are_refused(overrides: list[str], words: str) -> None:
    keys = [f"learner.{each}" for each in overrides]
    assert error_of([MODEL, *keys]).startswith(f"learner.{words}")


@pytest.mark.parametrize(
    ("overrides", "style"),
    [
        (["model.path=configs/policies/tiny"], "compact"),
        (["model.path={folder}"], "instructed"),
        (["model.path=org/name"], "instructed"),
        (
            [
                "model.path=configs/policies/tiny",
                "policy.url=http://127.0.0.1:9/v1",
                "policy.model=m",
            ],
            "instructed",
        ),
        (["model.path={folder}", "envhub.style=compact"], "compact"),
    ],
)
def test_prompt_style_follows_the_policy(overrides: list[str], style: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    words = [text.format(folder=tmp_path) for text in overrides]
    cfg = load_config(None, words, schema=PolicyConfig)
    assert cfg.envhub.style == style


def test_every_shipped_policy_names_its_prompt_style() -> None:
    folders = sorted((ROOT / "configs" / "policies").iterdir())
    assert [style_of_model(folder) for folder in folders] == ["compact"] * len(folders)


def test_unknown_prompt_style_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"prompt_style": "short"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="prompt_style=short: expects compact"):
        style_of_model(tmp_path)


def test_home_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    file = tmp_path / "a.yaml"
    file.write_text("run: {dir: ~/runs}\nreward: {r: ~/g.py:f}\n", encoding="utf-8")
    overrides = ["model.path=~/tiny", "data.train=~/d.jsonl", "envhub.envs=[~/e.py:make]"]
    cfg = load_config(str(file), overrides)
    assert (cfg.run.dir, cfg.model.path) == ("/home/a/runs", "/home/a/tiny")
    assert (cfg.envs.dataset.train, cfg.envhub.envs) == ("/home/a/d.jsonl", ["/home/a/e.py:make"])
    assert cfg.envs.dataset.reward == {"r": "/home/a/g.py:f"}
    values = ["~", "a~/b", "~ 5", "yaml:~/x"]
    assert with_base(values) == ["/home/a", "a~/b", "~ 5", "yaml:/home/a/x"]
    words = ["--config=~/a.yaml", "--key=~/k", "show", "x=~/y", "~/z"]
    assert list(map(word_with_base, words)) == [
        "--config=/home/a/a.yaml",
        "--key=/home/a/k",
        "show",
        "x=/home/a/y",
        "/home/a/z",
    ]


def test_removed_transport_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for config in (None, write(tmp_path, "old", "learner: {weights_transport: file}")):
        overrides = [MODEL, *["learner.weights_transport=file"][: config is None]]
        cfg = load_config(config, overrides)
        assert cfg.learner.weights_transport is WeightsTransport.AUTO
    assert caplog.messages == [
        "learner.weights_transport=file is removed and will be refused;"
        " learner.weights_transport=auto is used"
    ]
