"""Laws of the declared keys: each has a text and a law, and what breaks the law is refused."""

import math
import selectors
import socket
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args

import pytest

from common.config.actor import EnforceEager
from common.config.algorithm import PolicyLoss
from common.config.horizon import HorizonOverride, HorizonSection
from common.config.keys import conform, describe_kind, field_kinds
from common.config.knobs import (
    DEVICE,
    ENV_NAME,
    FILE_NAME,
    HOST,
    LONGEST_S,
    NAME,
    PATH,
    TEXT,
    URL,
    WORD,
    Constraint,
    Pattern,
    check,
)
from common.config.load import load_config
from common.config.model import ModelSection
from common.config.run_config import Launcher, bound_of_parts, check_training, trains_early
from common.config.tasks import TaskSection
from common.errors import ConfigError
from tests.configs import edited
from tools.cli.help import AllKeys

TASK = TaskSection(env="babyai", subset="GoTo")
BASE = AllKeys(
    model=ModelSection(path="/weights"),
    tasks=[TASK],
    horizon=HorizonSection(per_env={"babyai": HorizonOverride()}),
)


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Constraint | None]]:
    """Yield key, type, text and law of all that is no section, also of those in lists."""
    for field in fields(section):
        kind = field_kinds(section)[field.name]
        key = f"{prefix}{field.name}"
        if is_dataclass(kind):
            yield from leaves(kind, f"{key}.")
        elif get_args(kind) and is_dataclass(get_args(kind)[-1]):
            own = "[0]." if describe_kind(kind).startswith("a list") else ".babyai."
            yield from leaves(get_args(kind)[-1], f"{key}{own}")
        else:
            yield key, kind, field.metadata.get("text"), field.metadata.get("law")


LEAVES = list(leaves(AllKeys))
NUMBERS = [each for each in LEAVES if each[1] in (int, float, list[int])]
FREE = [key for key, kind, *_ in LEAVES if kind in (Any, dict[str, Any])]  # Values of any type.
LONG_TEXTS = ("envs.dataset.template", "envs.dataset.system")  # They may have several lines.
TEXTS = [
    each
    for each in LEAVES
    if each[1] in (str, list[str], dict[str, str]) and each[0] not in LONG_TEXTS
]


def refusal(key: str, kind: Any, value: object) -> tuple[str, str]:
    """Return the message of a config with this value, and how it must begin."""
    many = {list: [value], dict: {"a": value}}
    origin = kind.__origin__ if get_args(kind) else None
    told = f"{key}{ {list: '[0]', dict: '.a'}.get(origin, '') }={value!r}: "
    whole = many.get(origin, value)
    changes: dict[str, object] = {key: whole}
    if key.startswith("tasks[0]."):
        changes = {"tasks": [edited(TASK, {key.rpartition(".")[2]: whole})]}
    elif key.startswith("horizon.per_env."):
        override = edited(HorizonOverride(), {key.rpartition(".")[2]: whole})
        changes = {"horizon.per_env": {"babyai": override}}
    with pytest.raises(ConfigError) as caught:
        edited(BASE, changes)
    return str(caught.value), told


def test_every_unconstrained_key_is_flag_or_enum() -> None:
    ruled = {key for key, *_ in (*NUMBERS, *TEXTS)} | {*FREE, *LONG_TEXTS}
    of_users = ["envs.dataset.options", "groups.reward", "envs.dataset.reward"]
    assert sorted(FREE) == sorted(["model.chat_template_kwargs", "actor.engine_args", *of_users])
    others = [get_args(kind) or (kind,) for key, kind, *_ in LEAVES if key not in ruled]
    assert len(NUMBERS) > 150
    firsts = [(get_args(kind) or (kind,))[0] for kind, *_ in others]
    assert all(kind is bool or issubclass(kind, Enum) for kind in firsts)
    of_functions = {
        key
        for key, kind, *_ in LEAVES
        if any(isinstance(k, UnionType) for k in (kind, *get_args(kind)))
    }
    of_losses = {f"algorithm.{name}" for name in ("advantage", "policy_loss", "correction")}
    assert of_functions == {"horizon.kind", "curriculum.kind", "log.to"} | of_losses


def test_key_of_an_algorithm_takes_a_name_or_a_function() -> None:
    def loss(value: str) -> PolicyLoss | str:
        overrides = [f"algorithm.policy_loss={value}"]
        return load_config("smoke", overrides).algorithm.policy_loss

    assert loss("CISPO") is PolicyLoss.CISPO
    assert loss("losses.py:clipped") == "losses.py:clipped"
    for wrong in ("clip", "losses.py:", ":clipped"):
        with pytest.raises(ConfigError, match=r"algorithm\.policy_loss="):
            loss(wrong)


def test_every_key_has_a_help_text() -> None:
    assert [key for key, _, text, _ in LEAVES if not text] == []


def out_of_bounds(key: str, kind: Any, law: Constraint) -> list[float]:
    """Return numbers on both sides of the bounds, and those that are not finite."""
    step = 1 if kind is not float else 1e-9
    low = law.ge - step if law.ge is not None else law.gt
    high = law.le + max(step, law.le * 1e-9) if law.le is not None else law.lt
    assert low is not None, f"{key} needs a lower bound"
    assert high is not None, f"{key} needs an upper bound"
    if low == law.also:
        low -= step
    return [low, high, -math.inf, math.inf, math.nan]


@pytest.mark.slow
def test_number_out_of_bounds_is_refused() -> None:
    for key, kind, _, law in NUMBERS:
        assert law is not None, key
        for value in out_of_bounds(key, kind, law):
            message, told = refusal(key, kind, value)
            assert message == f"{told}{law.phrase}"


def test_configured_wait_stays_within_library_limits() -> None:
    waits = {key: law for key, _, _, law in NUMBERS if law and key.endswith("_s")}
    assert len(waits) > 40
    bounds = {key: law.le for key, law in waits.items() if not key.startswith("simulator.")}
    assert {key for key, le in bounds.items() if le is None or le > LONGEST_S} == set()


def test_longest_and_shortest_waits_are_accepted() -> None:
    assert not threading.Event().wait(timeout=1e-9)
    with selectors.DefaultSelector() as selector, socket.socket() as told:
        selector.register(told, selectors.EVENT_READ | selectors.EVENT_WRITE)
        assert selector.select(LONGEST_S)
    done = threading.Event()
    done.set()
    assert done.wait(timeout=LONGEST_S)


def test_overlong_text_is_refused_by_its_key() -> None:
    for key, kind, *_ in TEXTS:
        message, _ = refusal(key, kind, "x" * 100_000)
        assert message.startswith(key)


def test_malformed_text_is_refused_by_its_key() -> None:
    for key, kind, _, law in TEXTS:
        assert law is not None, key
        for value in ("two\nlines", "nul\0", *(["banana"] if law.one_of else [])):
            message, told = refusal(key, kind, value)
            assert message == f"{told}{law.phrase}"


def of_wrong_type(key: str, kind: Any) -> list[Any]:
    """Return values of types that the key does not have."""
    wrong: list[Any] = [None, [[1]], True if kind not in (bool, EnforceEager) else "maybe"]
    wrong += [] if key in FREE else [{"a": {"b": 1}}]
    wrong += [] if kind is str else ["banana"]
    wrong += [1.5, "1"] if kind is int else []
    return wrong


def test_wrong_type_is_refused_by_its_key() -> None:
    for key, kind, *_ in LEAVES:
        for value in of_wrong_type(key, kind) if kind is not Any else []:
            with pytest.raises(ConfigError) as caught:
                conform(value, kind, key=key)
            assert str(caught.value).startswith(key)
            assert ": expects " in str(caught.value)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (TEXT, ["", "a b", "ä"], ["a\nb", "\0", "\t"]),
        (NAME, ["a b"], ["", "  ", "a\n"]),
        (PATH, ["/a/b", "a b", ".", "/".join("x" * 15)], ["", " ", "\0", "x" * 256, "x/" * 2100]),
        (WORD, ["a", "a-b"], ["", "a b", "a\0"]),
        (FILE_NAME, ["a", "007", "a b.c", "ä"], ["", ".", "..", ".a", "a/b", "latest", "x" * 101]),
        (FILE_NAME, [], [" a", "a\n", "€" * 99]),
        (
            HOST,
            ["0.0.0.0", "::1", "localhost", "node-1.lab"],
            ["", "999.1.1.1", "a b", "-a", "a:1"],
        ),
        (
            URL,
            ["http://h", "https://h:1/v1"],
            ["x", "http://", "ftp://h", "http://h:port", "http://a b"],
        ),
        (DEVICE, ["auto", "cpu", "cuda", "cuda:3"], ["banana", "cuda:", "cuda:x", "CPU"]),
        (ENV_NAME, ["babyai", "mine:make", "a/b.py:make"], ["", "a b", "a:", ":b", "a|b"]),
    ],
)
def test_text_pattern_accepts_exactly_its_values(
    form: Pattern, right: list[str], wrong: list[str]
) -> None:
    law = Constraint(form=form)
    assert [text for text in right if not law.allows(text)] == []
    assert [text for text in wrong if law.allows(text)] == []


def test_default_configuration_satisfies_every_constraint() -> None:
    check(BASE)


def test_section_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        BASE.learner.lr = 1.0  # type: ignore[misc]
    kinds = {type(getattr(BASE, field.name)) for field in fields(AllKeys)}
    for kind in kinds - {bool, list, Launcher}:
        assert kind.__dataclass_params__.frozen, kind


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "learner.device=banana",
            "learner.device='banana': must be auto, cpu, cuda or cuda:<number>",
        ),
        ("learner.beta1=2", "learner.beta1=2.0: must be in [0, 1)"),
        ("actor.gpu_memory_frac=7", "actor.gpu_memory_frac=7.0: must be in (0, 1]"),
        ("learner.max_tokens_per_microbatch=0", "learner.max_tokens_per_microbatch=0: must be"),
        ("actor.delivery_window=0", "actor.delivery_window=0: must be"),
        ("log.level=LOUD", "log.level='LOUD': must be one of DEBUG, INFO"),
        ("learner.keep_checkpoints=-1", "learner.keep_checkpoints=-1: must be"),
        ("learner.checkpoint_every_steps=0", "learner.checkpoint_every_steps=0: must be"),
        ("envhub.capacity=0", "envhub.capacity=0: must be"),
        ("scheduler.heartbeat_s=.nan", "scheduler.heartbeat_s=nan: must be"),
        ("scheduler.dead_after_s=0", "scheduler.dead_after_s=0.0: must be"),
        ("scheduler.max_attempts=0", "scheduler.max_attempts=0: must be"),
        ("envhub.session_idle_s=-1", "envhub.session_idle_s=-1.0: must be"),
        ("tasks[0].weight=.inf", "tasks[0].weight=inf: must be"),
        ("groups.size=1000000000", "groups.size=1000000000: must be in [1, 4096]"),
        ("learner.port=70000", "learner.port=70000: must be in [0, 65535]"),
        ("run.name=../../etc", "run.name='../../etc': must be a plain file name"),
        ("run.name=latest", "run.name='latest': must be a plain file name"),
        ("run.name=", "run.name='': must be a plain file name"),
        ("run.dir=", "run.dir='': must be a path"),
        ("envhub.host=no such host", "envhub.host='no such host': must be an address"),
        ("tasks[0].env=a b", "tasks[0].env='a b': must be an environment's name"),
    ],
)
def test_absurd_value_is_refused_by_its_key(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [override])
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor.max_turn_tokens": 4096}, "actor.max_turn_tokens=4096: must be < actor.max_model"),
        ({"actor.min_concurrent": 65}, "actor.min_concurrent=65: must be at most actor.max_conc"),
        ({"actor.episode_timeout_s": 1.0}, "actor.episode_timeout_s=1.0: must be >= actor.turn_"),
        ({"scheduler.dead_after_s": 1.0}, "scheduler.dead_after_s=1.0: must be > scheduler.heart"),
        ({"groups.min_size": 9}, "groups.min_size=9: must be at most groups.size=8"),
        ({"learner.hold_back_steps": 5}, "learner.hold_back_steps=5: must be at most learner.max"),
        (
            {"learner.controller.ess_skip": 0.8},
            "learner.controller.ess_target=0.9: must be >= ess_gate",
        ),
        ({"horizon.gated.min_steps": 39}, "horizon.gated.min_steps=39: must be >= horizon.gated."),
        ({"horizon.stages": [5, 5]}, "horizon.stages=[5, 5]: must be positive, strictly"),
        ({"horizon.stages": []}, "horizon.stages=[]: must be positive, strictly"),
        ({"mixture.temperature": 2.0}, "mixture.temperature=2.0: changes nothing"),
        ({"sft.num_heads": 3}, "sft.num_heads=3: must divide sft.hidden_size=128"),
        ({"sft.num_kv_heads": 3}, "sft.num_kv_heads=3: must divide sft.num_heads=4"),
        ({"policy.url": "http://h/v1"}, "policy.model='': must name a model of the endpoint"),
        ({"policy.backoff_s": 61.0}, "policy.backoff_s=61.0: must be at most policy.max_backoff"),
        ({"env.url": "http://h"}, "env.url='http://h': env.url and env.dialect need"),
        (
            {"actor.kv_cache_blocks": 3},
            "actor.kv_cache_blocks=3: too few blocks for one episode of",
        ),
        ({"tasks": [TASK, TASK]}, "tasks='babyai/GoTo': is listed twice"),
    ],
)
def test_contradiction_is_refused_by_its_keys(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        edited(BASE, changes)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["groups.forks=2"], "groups.forks=2: makes trees of 3 members, which do not fill"),
        (["groups.forks=3", "groups.fork_turns=[]"], "groups.fork_turns=[]: must name a turn"),
        (
            ["groups.forks=3", "groups.fork_turns=[2,6]"],
            "groups.fork_turns=[6]: must be below the first stage of the horizon, 6 turns",
        ),
        (["groups.forks=3", "train.mode=sync"], "groups.forks=3: needs train.mode=async"),
        (
            ["groups.forks=3", "actor.continue_episodes=false"],
            "groups.forks=3: needs actor.continue_episodes=true",
        ),
        (
            ["groups.forks=3", "actor.endpoint=true", "actor.agent=[player]"],
            "groups.forks=3: needs actor.endpoint=false",
        ),
        (
            ["groups.forks=3", "algorithm.advantage=running"],
            "groups.forks=3: needs algorithm.advantage=grpo, rloo or",
        ),
    ],
)
def test_forks_are_refused_where_nothing_can_fork(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", overrides)
    assert str(caught.value).startswith(words)


def test_training_requires_learner_room_for_an_episode() -> None:
    cfg = edited(BASE, {"actor.max_model_len": 8192, "learner.max_tokens_per_microbatch": 8192})
    check_training(cfg)
    cfg = edited(cfg, {"learner.max_tokens_per_microbatch": 8191})
    with pytest.raises(ConfigError, match=r"^learner\.max_tokens_per_microbatch=8191: must be >="):
        check_training(cfg)
    two = {"learner.num_ranks": 2, "learner.sequence_ranks": 2}
    check_training(edited(cfg, two | {"learner.max_tokens_per_microbatch": 4096}))
    with pytest.raises(ConfigError, match=r"=4095: must be >= .*8192 / learner\.sequence_ranks=2,"):
        check_training(edited(cfg, two | {"learner.max_tokens_per_microbatch": 4095}))


PARTS = "learner.partial_episodes=turns"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.mode=sync"], "learner.partial_episodes='turns': needs train.mode=async"),
        (["groups.forks=3"], "learner.partial_episodes='turns': needs groups.forks=0"),
        (
            ["algorithm.teacher.path=t"],
            "learner.partial_episodes='turns': needs no algorithm.teach",
        ),
        (["algorithm.policy_loss=gspo"], "algorithm.policy_loss='gspo': computes a ratio over a"),
        (["learner.max_lag_steps=0"], "learner.max_lag_steps=0: must be at least 1 with learner."),
        (
            ["actor.endpoint=true", "actor.agent=[x]", "algorithm.row_credit=root"],
            "algorithm.row_credit='root': must be all with learner.partial_episodes=turns",
        ),
        (
            ["algorithm.advantage=ppo", "groups.filter=a:b"],
            "groups.filter='a:b': must be empty with algorithm.advantage=ppo",
        ),
        (
            ["algorithm.advantage=ppo", "groups.reward=a:b"],
            "groups.reward='a:b': must be empty with algorithm.advantage=ppo",
        ),
    ],
)
def test_parts_are_refused_where_they_cannot_be_trained(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [PARTS, *overrides])
    assert str(caught.value).startswith(words)


def test_only_a_critic_trains_unfinished_episodes() -> None:
    ppo = "algorithm.advantage=ppo"
    assert trains_early(load_config("quickstart", [PARTS, ppo]))
    assert not trains_early(load_config("quickstart", [PARTS]))
    assert not trains_early(load_config("quickstart", [ppo]))


@pytest.mark.parametrize(("num_steps", "expected"), [(0, 5), (3, 2), (5, 1)])
def test_parts_are_sent_earlier_if_weights_are_held_back(num_steps: int, expected: int) -> None:
    keys = ["learner.max_lag_steps=5", f"learner.hold_back_steps={num_steps}"]
    ppo = "algorithm.advantage=ppo"
    assert bound_of_parts(load_config("quickstart", [PARTS, ppo, *keys])) == expected
    assert bound_of_parts(load_config("quickstart", [PARTS, *keys])) == 0
