"""Laws of a learner whose live keys change between two steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from common.wire.messages import LiveConfig
from learner.build import Learner
from learner.main import follow
from learner.recovery.checksums import Start, settings_of
from tests.configs import edited

CFG = edited(RunConfig(), {"model.path": "x", "learner.device": "cpu"})


class Parts:
    """The parts of a learner that a change reaches, and the calls that they receive."""

    def __init__(self, root: Path) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.num_batches = 3
        self.live_config: LiveConfig | None = None
        self.run_dir = RunDir(root=root)
        self.trainer = SimpleNamespace(
            configure=lambda **given: self.calls.append(("trainer", given)),
            checksums=lambda: ("w", "f"),
            num_batches=3,
        )
        self.checkpoints = SimpleNamespace(
            configure=lambda cfg: self.calls.append(("checkpoints", cfg.keep_checkpoints))
        )
        settings = settings_of(edited(CFG, {"learner.num_threads": 2}))
        last = Start(
            version=0, number=0, weights="", frozen="", code="c", machine={}, settings=settings
        )
        self.checksums = SimpleNamespace(
            last_start=last, begin=lambda start: self.calls.append(("start", start))
        )
        self.intake = self

    def follow(self, cfg: RunConfig) -> RunConfig:
        learner = cast(Learner, self)
        return follow(cfg, learner, version=7, save=lambda: self.calls.append(("save", None)))


def test_change_of_the_rate_begins_a_new_start_and_a_checkpoint(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    assert parts.follow(CFG) is CFG
    parts.live_config = LiveConfig(
        number=1, values={"learner.lr": "2e-05", "eval.every_steps": "9"}
    )
    cfg = parts.follow(CFG)
    assert cfg == edited(CFG, {"learner.lr": 2e-5})
    names = [name for name, _ in parts.calls]
    assert names == ["checkpoints", "trainer", "start", "save"]
    given = dict(parts.calls)
    assert given["trainer"] == {"lr": 2e-5, "muon_lr": CFG.learner.muon_lr, "num_steps": 100}
    start = given["start"]
    assert isinstance(start, Start)
    assert (start.version, start.number) == (7, 3)
    assert (start.settings["learner"]["lr"], start.settings["learner"]["num_threads"]) == (2e-5, 2)
    parts.calls.clear()
    assert parts.follow(cfg) is cfg
    assert parts.calls == []


def test_change_of_an_interval_changes_no_training(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.live_config = LiveConfig(number=1, values={"learner.keep_checkpoints": "5"})
    assert parts.follow(CFG).learner.keep_checkpoints == 5
    assert parts.calls == [("checkpoints", 5)]
