"""Laws of an engine that dies or fails to start: the error names the process and the cause."""

import asyncio
import gc
import os
import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from common.config.actor import ActorSection
from common.config.model import ModelSection
from common.errors import ConfigError, EngineError
from tests.actor.engine.engine_rig import WAIT_S, ExactEngine, Rig, save_tiny_policy

pytestmark = pytest.mark.slow


@pytest.fixture
def rig(exact_engine: ExactEngine) -> Iterator[Rig]:
    """The common engine, which a test of this file ends."""
    yield exact_engine.lend()
    exact_engine.end()


def core_processes() -> list[psutil.Process]:
    """Return the engines' processes that run; one that has ended may not have been waited for."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            if "EngineCore" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGILL, marks=pytest.mark.long)]
)
def test_killed_engine_reports_the_signal(rig: Rig, number: int) -> None:
    async def law() -> None:
        assert rig.tiles in (["not_needed"], ["granted"]), "asked before the first token"
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):  # Forced tokens end no turn early.
                await rig.publish_first(publisher, link, rig.forced_weights(1))
        sampling = rig.generate("doomed", [5, 6], max_tokens=400)
        await rig.generate("clock", [5, 6], max_tokens=4)
        (core,) = core_processes()
        os.kill(core.pid, number)
        name = signal.Signals(number).name
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(EngineError, match=f"engine died: .*EngineCore.* killed by {name}"):
                await sampling
            with pytest.raises(EngineError, match=f"killed by {name}"):
                await rig.generate("later", [5, 6], max_tokens=4)

    rig.run(law())


@pytest.mark.long
def test_failed_engine_start_reports_its_cause(tmp_path: Path) -> None:
    from actor.engine.engine import Engine

    save_tiny_policy(tmp_path / "policy", is_tied=False)
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"no weights at all")
    model = ModelSection(path=str(tmp_path / "policy"), dtype="float32")
    before = core_processes()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = Engine.start(model, ActorSection(max_model_len=512), end_of_turn_ids=[], seed=0)
        with pytest.raises(EngineError, match=r"(?s)did not start: \w.*Safetensor") as raised:
            asyncio.run(start)
        gc.collect()  # an open context would warn here
    first, _, _ = str(raised.value).partition("; its last lines:")
    assert "\n" not in first
    assert re.search(r"; the cause is \w*\.?\w*Error: .*[Ss]afetensor|Error: .*header", first), (
        first
    )
    assert "its last lines:" in str(raised.value)
    assert core_processes() == before


def test_refused_vllm_arguments_raise_config_error(tmp_path: Path) -> None:
    from actor.engine.engine import Engine

    save_tiny_policy(tmp_path / "policy", is_tied=False)
    model = ModelSection(path=str(tmp_path / "policy"), dtype="float32")
    actor = ActorSection(max_model_len=512, max_concurrent=50_000)
    before = core_processes()
    law = r"refuses its arguments: max_num_batched_tokens .* max_num_seqs \(50000\)\. Change the"
    with pytest.raises(ConfigError, match=law):
        asyncio.run(Engine.start(model, actor, end_of_turn_ids=[], seed=0))
    assert core_processes() == before
