"""Laws of changes of live keys, in the scheduler and from the command `set`."""

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.config.live import read_changes, with_changes
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.access.identities import Identity
from common.wire.messages import (
    ConfigChanged,
    ConfigRequest,
    GroupArrived,
    Heartbeat,
    Lease,
    LiveConfig,
    Outcome,
    Outcomes,
    Rejected,
    Welcome,
)
from common.wire.security import create_keys
from scheduler.live_config import LATEST_S, LiveChanges
from scheduler.main import serve
from tests.configs import edited
from tests.scheduler.builders import (
    CATALOGUE,
    done_of,
    hello_of,
    make_config,
    outcome_of,
    request_of,
    seen_of,
)
from tests.scheduler.catalogue_server import serve_catalogue
from tests.scheduler.test_main import Role
from tools.cli.command_line import ParsedCommand
from tools.cli.set import set_keys

WAIT_S = 60.0
CFG = edited(make_config(num_steps=10, per_step=1), {"model.path": "x", "envhub.style": "compact"})
CHANGE = ConfigRequest(request="r1", old={"learner.lr": "1e-06"}, new={"learner.lr": "2e-05"})


def changes_of(run_dir: RunDir, saved: dict[str, Any] | None = None) -> LiveChanges:
    return LiveChanges(CFG, run_dir, saved)


def accept(live: LiveChanges, request: ConfigRequest, *, now: float = 0.0, step: int = 4) -> Any:
    return live.accept(request, b"sender", now=now, step=step, is_over=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(root=tmp_path / "r")
    save_config(CFG, run_dir.config)
    return run_dir


def test_change_waits_for_the_step_boundary_or_a_minute(run_dir: RunDir) -> None:
    live = changes_of(run_dir)
    assert accept(live, CHANGE, now=100.0) == ConfigChanged(number=-1, step=4)
    assert accept(live, CHANGE, now=130.0) == ConfigChanged(number=-1, step=4)  # Sent again.
    assert live.take_due(100.0 + LATEST_S, is_boundary=False) == []
    assert live.take_due(101.0 + LATEST_S, is_boundary=False) == [(CHANGE, b"sender")]
    assert live.take_due(200.0, is_boundary=True) == []


def test_applied_change_is_recorded_and_answered_after_a_restart(run_dir: RunDir) -> None:
    live = changes_of(run_dir)
    assert live.apply(CHANGE, step=5, is_over=False).number == 1
    saved = live.saved()
    assert read_changes(run_dir.config_changes) == []  # A kill here: only the state is saved.
    again = changes_of(run_dir, saved)
    assert again.cfg == edited(CFG, {"learner.lr": 2e-5})
    (change,) = read_changes(run_dir.config_changes)
    assert (change.number, change.step, change.new) == (1, 5, {"learner.lr": "2e-05"})
    assert load_config(str(run_dir.config), []) == again.cfg
    assert accept(again, CHANGE) == ConfigChanged(number=1, step=5)
    third = LiveChanges(again.cfg, run_dir, saved)
    assert third.number == 1
    assert len(read_changes(run_dir.config_changes)) == 1


def test_interrupted_change_follows_a_start_with_other_settings(run_dir: RunDir) -> None:
    live = changes_of(run_dir)
    live.apply(CHANGE, step=5, is_over=False)
    saved = live.saved()  # A kill here, and a start with another setting.
    with_changes(edited(CFG, {"groups.max_oversample": 5.0}), run_dir, now_s=0.0)
    assert changes_of(run_dir, saved).cfg.learner.lr == 2e-5
    changes = read_changes(run_dir.config_changes)
    assert [(each.number, *each.new) for each in changes] == [
        (1, "groups.max_oversample"),
        (2, "learner.lr"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({"run.seed": "0"}, {"run.seed": "1"}, r"run\.seed: this key cannot change.*learner\.lr"),
        ({"learner.lr": "3e-06"}, {"learner.lr": "1e-05"}, r"learner\.lr=1e-06 now"),
        ({"learner.lr": "1e-06"}, {"learner.lr": "-1"}, r"learner\.lr=-1"),
        ({"horizon.stages": "[5, 10, 20]"}, {"horizon.stages": "[9, 3]"}, "strictly increasing"),
        ({}, {"learner.lr": "1e-05"}, "the present and the new value"),
        ({}, {}, "the present and the new value"),
        ({"train.num_steps": "10"}, {"train.num_steps": "6"}, "step 7 or later"),
        ({"actor.max_concurrent": "64"}, {"actor.max_concurrent": "0"}, "max_concurrent=0"),
    ],
)
def test_wrong_change_is_refused_with_its_reason(
    run_dir: RunDir, old: dict[str, str], new: dict[str, str], words: str
) -> None:
    answer = accept(changes_of(run_dir), ConfigRequest(request="r", old=old, new=new))
    assert isinstance(answer, Rejected)
    with pytest.raises(ValueError, match=words):
        raise ValueError(answer.reason)


def test_second_change_of_a_key_must_know_the_first(run_dir: RunDir) -> None:
    live = changes_of(run_dir)
    live.apply(CHANGE, step=5, is_over=False)
    with pytest.raises(ConfigError, match=r"learner\.lr=2e-05 now, since another change"):
        live.apply(CHANGE, step=5, is_over=False)


def test_actor_may_not_change_the_configuration() -> None:
    reason = Identity("a", "actor", "p").why_not(CHANGE)
    assert reason == "the key of a (actor) does not allow this ConfigRequest"


def test_role_with_other_values_receives_the_present_ones(run_dir: RunDir) -> None:
    live = changes_of(run_dir)
    live.apply(CHANGE, step=5, is_over=False)
    live.record()
    beat = Heartbeat(role="actor", name="a", version=1, running=[], config=0)
    values = live.hear(beat)
    assert values is not None
    assert (values.number, values.values["learner.lr"]) == (1, "2e-05")
    assert live.hear(edited(beat, {"config": 1})) is None
    assert live.hear(edited(beat, {"config": -1})) is None  # Code of the previous version.


@contextlib.contextmanager
def serving(cfg: RunConfig, run_dir: RunDir) -> Iterator[Role]:
    """Run a scheduler in a thread, with a role that is connected to it."""
    keys = create_keys(run_dir.keys)
    stop = threading.Event()
    run_dir.forget_address("scheduler")
    thread = threading.Thread(target=serve, args=(cfg, run_dir, stop))
    thread.start()
    context = zmq.Context()
    role = Role(context, run_dir, keys)
    try:
        yield role
    finally:
        role.close()
        stop.set()
        thread.join(WAIT_S)
        context.term()


def request_to_set(run_dir: RunDir, *changes: str) -> ParsedCommand:
    where = [f"run.dir={run_dir.root.parent}", f"run.name={run_dir.root.name}"]
    words = [*where, *changes]
    return ParsedCommand(
        command="set", config=None, overrides=words, is_dry=False, suite=None, json=None
    )


def train_group(role: Role, leases: list[Lease], step: int) -> LiveConfig:
    """Report a trained group and the end of a step; return the new values of the live keys."""
    role.tell(
        Outcomes(
            seen=[seen_of(lease) for lease in leases],
            outcomes=[outcome_of(lease.episode_id, Outcome.TRAINED) for lease in leases],
            groups=[GroupArrived(group_id=leases[0].group_id, is_ready=True)],
        )
    )
    answers = [role.ask(done_of(step))]
    while getattr(answers[-1], "learner_version", -1) != step:
        answers.append(role.answer())
    (live,) = [each for each in answers if isinstance(each, LiveConfig)]
    return live


def test_set_changes_horizons_at_the_next_step_boundary(run_dir: RunDir) -> None:
    accepted = threading.Event()

    class Output(io.StringIO):
        """An output that notes its first text."""

        def write(self, text: str) -> int:
            accepted.set()
            return super().write(text)

    with (
        serve_catalogue(CATALOGUE) as url,
        ThreadPoolExecutor(1) as pool,
        contextlib.redirect_stdout(Output()) as output,
    ):
        save_config(edited(CFG, {"envhub.url": url}), run_dir.config)
        cfg = load_config(str(run_dir.config), [])
        with serving(cfg, run_dir) as role:
            assert isinstance(role.ask(hello_of("actor-0")), Welcome)
            first = role.ask(request_of("actor-0", 4)).leases
            request = request_to_set(run_dir, "horizon.stages=[7,14,28]", "learner.lr=2e-5")
            done = pool.submit(set_keys, request, answer_s=WAIT_S)
            assert accepted.wait(WAIT_S), done.exception(1.0)
            second = role.ask(request_of("actor-0", 4)).leases
            assert {lease.horizon for lease in (*first, *second)} == {5}
            assert train_group(role, first, 1).values["learner.lr"] == "2e-05"
            assert done.result(WAIT_S) == 0
            third = role.ask(request_of("actor-0", 4)).leases
            assert {(lease.opened_at_version, lease.horizon) for lease in third} == {(1, 7)}
        status = json.loads(run_dir.status.read_text(encoding="utf-8"))
        assert status["live_config"]["number"] == 1
        changed = load_config(str(run_dir.config), [])
        assert changed == edited(cfg, {"horizon.stages": [7, 14, 28], "learner.lr": 2e-5})
        (change,) = read_changes(run_dir.config_changes)
        assert (change.step, change.old["horizon.stages"]) == (1, "[5, 10, 20]")
        with serving(changed, run_dir) as role:
            role.tell(edited(hello_of("actor-0"), {"config": 0}))
            answers = [role.answer(), role.answer()]
            (live,) = [each for each in answers if isinstance(each, LiveConfig)]
            assert live.values["horizon.stages"] == "[7, 14, 28]"
            assert set_keys(request) == 0
    told = output.getvalue().splitlines()
    assert "waiting for the next step boundary" in told[0]
    assert "change 1 is in force after step 1: horizon.stages [5, 10, 20] -> [7, 14, 28]" in told[1]
    assert told[2].endswith("the run has these values already")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give a live key"),
        (["learner.lr"], "a change is key=value"),
        (["learner.seed=1"], "no such key"),
        (["run.seed=1"], "cannot change during a run"),
        (["learner.lr=0"], r"learner\.lr=0"),
        (["learner.lr=1e-5"], "It has no scheduler"),
    ],
)
def test_set_reports_a_wrong_request(run_dir: RunDir, words: list[str], reason: str) -> None:
    save_config(CFG, run_dir.config)
    with pytest.raises(ConfigError, match=reason):
        set_keys(request_to_set(run_dir, *words))
