"""Laws of errors before a role has begun: which of them a restart may mend."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from common.errors import ConfigError, EngineError, EnvError, NotStarted, PeerMissing
from tools.launch.start import StartGuard

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(error: BaseException, folder: Path | None, *, has_begun: bool = False) -> None:
    with StartGuard(folder, has_begun=lambda: has_begun):
        raise error


def test_failed_import_raises_config_error_with_remedy(tmp_path: Path) -> None:
    law = "ModuleNotFoundError: No module named 'vllm'; run `make setup`"
    with pytest.raises(ConfigError, match=law):
        fail(ModuleNotFoundError("No module named 'vllm'"), tmp_path)


def test_torchvision_of_another_build_is_named(tmp_path: Path) -> None:
    error = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(ConfigError, match=r"'PreTrainedModel'; torchvision is of another build"):
        fail(error, tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'"),
        AttributeError("module 'vllm' has no attribute 'x'"),
        NotImplementedError("no kernel"),
        RuntimeError("Unrecognized key 'pinned_max_round_threshold_mb' in CUDA allocator config"),
    ],
)
def test_wrong_version_raises_config_error_with_remedy(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fail(error, tmp_path)
    law = "; `python run.py doctor` compares the installed versions with the pinned ones"
    assert str(caught.value) == f"{type(error).__name__}: {error}{law}"


def test_missing_external_file_raises_config_error(tmp_path: Path) -> None:
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/data/items.json")
    with pytest.raises(ConfigError, match=r"/data/items.json: no such file or directory"):
        fail(missing, tmp_path)
    own = FileNotFoundError(errno.ENOENT, "no", str(tmp_path / "addresses" / "learner"))
    with pytest.raises(NotStarted):
        fail(own, tmp_path)


def test_role_failure_is_one_line_without_log(tmp_path: Path) -> None:
    error = EngineError("engine did not start:\n no room; its last lines:\n  a\n  b")
    with pytest.raises(NotStarted, match=r"^EngineError: engine did not start: no room$"):
        fail(error, tmp_path)
    with pytest.raises(NotStarted, match=r"^AssertionError$"):
        fail(AssertionError(), None)


@pytest.mark.parametrize(
    "error",
    [
        EnvError("no catalogue"),
        PeerMissing("no learner within 3s"),
        TimeoutError(),
        ConnectionError("refused"),
        FULL,
        OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)),
        zmq.ZMQError(errno.EADDRINUSE),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        EngineError("engine did not start; the cause is OutOfMemoryError: CUDA out of memory"),
        ConfigError("actor.name=a: is taken"),
        KeyboardInterrupt(),
    ],
)
def test_external_failure_is_unchanged(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised:
        fail(error, tmp_path)
    assert raised.value is error


def test_failure_after_the_start_is_unchanged(tmp_path: Path) -> None:
    for error in (EngineError("engine died"), ImportError("lazy")):
        with pytest.raises(type(error)):
            fail(error, tmp_path, has_begun=True)


BEGINS = """
import sys
from pathlib import Path
from common.stall.beacon import beacon_of, has_begun
from common.store.run_dir import RunDir
with beacon_of(RunDir(root=Path(sys.argv[1])), "learner", start_s=9.0) as beacon:
    print(has_begun())
    beacon.note("intake", "serving")
    print(has_begun())
    beacon.note("main", "step 1")
    print(has_begun())
"""


def test_role_begins_once_its_main_loop_runs(tmp_path: Path, repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGINS, str(tmp_path)],
        cwd=repository,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
