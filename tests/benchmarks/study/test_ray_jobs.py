"""Laws of commands that a Ray cluster runs, and of those that find no room on it."""

import tempfile
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import LongstrideError
from tests.common.launch.ray.clusters import running_cluster, wait_for
from tests.common.launch.test_launch import is_gone

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WRITE = """
import os, sys, time
with open(sys.argv[3], "w") as file: file.write(str(os.getpid()))
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "w") as file: file.write("done")
"""


@pytest.fixture(scope="module")
def ray() -> Generator[Any]:
    """A cluster of one CPU, to which this process is attached."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        running_cluster(Path(folder), num_cpus=1) as nodes,
    ):
        import ray  # after the environment is set

        ray.init(address=nodes.address, log_to_driver=False)
        try:
            yield ray
        finally:
            ray.shutdown()


def write(sleep_s: float, pid: str = "/dev/null") -> list[str]:
    return ["-c", WRITE, "{here}/a.json", str(sleep_s), pid]


@pytest.mark.long
def test_command_waits_for_room_held_by_another(ray: Any) -> None:
    from benchmarks.study.ray_jobs import Jobs

    jobs = Jobs(stop=threading.Event(), place_timeout_s=10.0)
    how: dict[str, Any] = {"keep": "*.json", "timeout_s": 120.0}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(jobs.perform, write(15.0), **how) for _ in range(2)]
        assert [each.result(timeout=150) for each in both] == [{"a.json": "done"}] * 2


def test_command_without_room_or_time_is_named(ray: Any) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    from benchmarks.study.ray_jobs import Jobs

    others = placement_group([{"CPU": 1.0}])  # Another job takes the CPU.
    assert others.wait(60)
    jobs = Jobs(stop=threading.Event(), place_timeout_s=2.0)
    with pytest.raises(LongstrideError, match="no Ray node had a free CPU for 2 s"):
        jobs.perform(write(0.0), keep="*", timeout_s=60.0)
    remove_placement_group(others)
    jobs = Jobs(stop=threading.Event(), place_timeout_s=60.0)
    with pytest.raises(LongstrideError, match="did not end within 1 s"):
        jobs.perform(write(60.0), keep="*", timeout_s=1.0)


@pytest.mark.long
def test_stopped_study_ends_its_command(ray: Any, tmp_path: Path) -> None:
    from benchmarks.study.ray_jobs import Jobs

    stop, path = threading.Event(), tmp_path / "pid"
    jobs = Jobs(stop=stop, place_timeout_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        try:
            going = pool.submit(jobs.perform, write(600.0, str(path)), keep="*", timeout_s=600.0)
            wait_for(lambda: path.exists() and path.read_text(encoding="utf-8") != "")
        finally:
            stop.set()
        with pytest.raises(LongstrideError, match="stopped"):
            going.result(timeout=60)
    pid = int(path.read_text(encoding="utf-8"))
    wait_for(lambda: is_gone(pid))
