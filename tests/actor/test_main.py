"""Laws of an actor that is terminated while it is still starting: a real process."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from common.host.child_process import ChildProcess
from common.wire.security import create_keys
from tests.actor.engine.engine_rig import save_tiny_policy
from tests.bounds import at_most

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timed]

START_S = 180.0
END_S = 1.0
CODE = """
import sys
from pathlib import Path
from actor.main import run
from common.config.run_config import ActorSection, ModelSection, RunConfig
from common.log import configure_logging
from common.store.run_dir import RunDir
configure_logging("actor", "INFO")
root = Path(sys.argv[1])
model = ModelSection(path=str(root / "policy"), dtype="float32")
run(RunConfig(model=model, actor=ActorSection(name="a", max_concurrent=4)), RunDir(root=root))
"""


@pytest.mark.parametrize("moment", ["starting engine", "engine ready"])
def test_starting_actor_ends_quickly_on_sigterm(tmp_path: Path, moment: str) -> None:
    save_tiny_policy(tmp_path / "policy", is_tied=False)
    create_keys(tmp_path / "keys")
    log = tmp_path / "actor.log"
    actor = ChildProcess(
        "actor",
        [sys.executable, "-c", CODE, str(tmp_path)],
        log_path=log,
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    try:
        actor.wait_until(
            lambda: moment in log.read_text(errors="replace", encoding="utf-8"), timeout_s=START_S
        )
        children = psutil.Process(actor.pid).children(recursive=True)
        asked = time.monotonic()
        actor.terminate()
        while actor.poll() is None and time.monotonic() < asked + 60.0:
            time.sleep(0.01)  # a process that ends has no event to wait for
        assert time.monotonic() - asked < at_most(END_S)
        assert actor.poll() == 0
        _, left = psutil.wait_procs(children, timeout=60.0)
        assert left == [], "its engine outlives it"
    finally:
        actor.clear_away()
