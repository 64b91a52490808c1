"""Laws of giving memory back, and of taking no more than is asked for."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from common.cpu import family_cpu_s
from common.errors import ConfigError
from common.memory import descendants, family_bytes, resident_bytes, trim_heap
from common.repository import ROOT
from tools.cli.command_line import parse, run_command
from tools.launch import train


def test_trimming_returns_freed_memory() -> None:
    process = psutil.Process()
    # Small enough for the heap, large together; the last one keeps the heap's end in use.
    blocks = [torch.ones(4_000) for _ in range(5_000)]
    keep = torch.ones(4_000)
    used = process.memory_info().rss
    del blocks
    if trim_heap():
        assert used - process.memory_info().rss > 40_000_000
    assert keep.sum() == 4_000


PARENT = """
import subprocess, sys, threading
def start():
    pipe = subprocess.PIPE
    code = "print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
    child.stdout.readline()  # The interpreter of the child has started.
    print(child.pid, flush=True)
    sys.stdin.read()
    child.communicate()
thread = threading.Thread(target=start)
thread.start()
thread.join()
"""


def test_memory_of_a_process_includes_children_of_its_threads() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        process = psutil.Process(parent.pid)
        assert [each.pid for each in descendants(process)] == [child]
        assert child in [each.pid for each in descendants(psutil.Process())]
        alone = process.memory_info().rss
        assert resident_bytes([parent.pid])[parent.pid] >= alone + 1_000_000
        parent.communicate()
    assert resident_bytes([parent.pid]) == {}


def test_exact_size_is_read_while_memory_grows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def exact() -> int:
        sizes.append(family_bytes())
        return sizes[-1]

    monkeypatch.setattr(train, "SAMPLE_S", 0.0)
    monkeypatch.setattr(train, "family_bytes", exact)
    watch = train.MemoryWatch()
    for _ in range(5):
        watch.sample()
    assert len(sizes) == 1
    own = psutil.Process().memory_info().rss
    block = torch.ones(max(100_000_000, own // 4) // 4)
    watch.sample()
    assert len(sizes) == 2
    assert watch.peak_bytes == sizes[1] > sizes[0] + 50_000_000
    del block
    watch.sample()
    assert len(sizes) == 2
    assert watch.peak_bytes == sizes[1]


def test_memory_is_measured_without_reading_every_process() -> None:
    opened: list[str] = []
    is_listening = [True]

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if is_listening[0] and event == "open" and str(arguments[0]).startswith("/proc/"):
            opened.append(str(arguments[0]).split("/")[2])

    sys.addaudithook(listen)
    process = psutil.Process()
    ours = {str(each.pid) for each in (process, *process.children(recursive=True))} | {
        "self",
        "stat",
    }
    opened.clear()
    resident_bytes([process.pid])
    family_cpu_s()
    is_listening[0] = False
    assert set(opened) <= ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", "pinned_max_round_threshold_mb:1"),
        pytest.param("backend:native", "", marks=pytest.mark.long),
    ],
)
def test_pinned_memory_is_exact_unless_configured(given: str, kept: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ |= {"PYTORCH_CUDA_ALLOC_CONF": given} if given else {}
    said = (
        "from common.memory import take_pinned_memory_exactly; take_pinned_memory_exactly()\n"
        "import os, torch; print(os.environ.get('PYTORCH_ALLOC_CONF', ''))\n"
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    command = [sys.executable, "-c", said]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, encoding="utf-8", timeout=240
    )
    assert done.stdout.splitlines() == [kept, kept or given]  # torch uses it.


OLD_TORCHES = """
import os, torch
from common.memory import take_pinned_memory_exactly

def refuse(setting):
    if setting:
        raise RuntimeError(f"Unrecognized key {setting!r} in CUDA allocator config.")

torch._C._accelerator_setAllocatorSettings = refuse
take_pinned_memory_exactly()
print("PYTORCH_ALLOC_CONF" in os.environ)
del torch._C._accelerator_setAllocatorSettings
take_pinned_memory_exactly()
print("PYTORCH_ALLOC_CONF" in os.environ)
"""


@pytest.mark.long
@pytest.mark.slow
def test_torch_without_exact_pinned_memory_keeps_default() -> None:
    """One torch refuses the setting, which is logged. An older one has no such function."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", OLD_TORCHES]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, encoding="utf-8", timeout=240
    )
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.count("refuses pinned_max_round_threshold_mb:1: Unrecognized key") == 1


def test_learner_allocates_pinned_memory_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # whatever happens here ends with the test
    with pytest.raises(ConfigError, match="no such run"):
        run_command(parse(["learner", "run.name=nobodys"]))
    assert os.environ["PYTORCH_ALLOC_CONF"] == "pinned_max_round_threshold_mb:1"
