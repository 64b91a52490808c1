"""Laws of a version in memory that the workers of a node share."""

import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest
import torch

from common.errors import WeightSyncError
from common.weights.node_copy import CopyUnreachable, CopyView, NodeCopy, node_id

NUM_BYTES = 10_000  # More than one page.
CLONE_NEWNET = 0x40000000
UNPRIVILEGED = 65_534  # A user without rights.
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="changes the user or the namespace")


@pytest.fixture
def copy() -> NodeCopy:
    copy = NodeCopy(NUM_BYTES)
    copy.buffer.fill_(7)
    copy.version = 3
    return copy


def in_child(work: Callable[[], object]) -> str:
    """Run `work` in a process of its own; return the name of its error, or "" without one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # The child ends without any cleanup of the tests' process.
        try:
            work()
        except WeightSyncError as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as report:
        text = report.read()
    os.waitpid(child, 0)
    return text


def test_view_reads_the_bytes_until_it_is_unlocked(copy: NodeCopy) -> None:
    view = CopyView(copy.show(), 3)
    other = CopyView(copy.show(), 3)
    assert torch.equal(view.buffer, torch.full((NUM_BYTES,), 7, dtype=torch.uint8))
    other.unlock()
    assert not copy.claim(), "one worker still reads"
    view.unlock()
    assert copy.claim()
    assert not view.lock(), "the writer changes the bytes"


def test_write_to_a_view_changes_no_other_worker(copy: NodeCopy) -> None:
    view = CopyView(copy.show(), 3)
    view.buffer.fill_(1)
    assert copy.buffer.unique().tolist() == [7]
    assert CopyView(copy.show(), 3).buffer.unique().tolist() == [7]


@pytest.mark.parametrize("version", [-1, 4])
def test_replaced_version_is_refused(copy: NodeCopy, version: int) -> None:
    place = copy.show()
    copy.version = version
    with pytest.raises(WeightSyncError, match=r"version 3 in the memory .* was replaced"):
        CopyView(place, 3)
    copy.version = 3
    assert copy.claim()
    with pytest.raises(WeightSyncError, match="was replaced"):
        CopyView(place, 3)


def test_every_other_process_checks_the_bytes(copy: NodeCopy) -> None:
    place = copy.show()
    assert in_child(lambda: CopyView(place, 3)) == ""
    copy.buffer[-1] ^= 1
    assert in_child(lambda: CopyView(place, 3)).endswith(
        f"version 3 in the memory of process {os.getpid()} is damaged"
    )


def test_next_view_uses_the_map_again_unless_it_was_written(copy: NodeCopy) -> None:
    place = copy.show()

    def view_again(writes: bool) -> None:
        first = CopyView(place, 3)
        if writes:
            first.buffer[0] = 8
        again = CopyView(place, 3, before=first.mapped)
        is_same = again.buffer.data_ptr() == first.buffer.data_ptr()
        raise WeightSyncError(f"{is_same} {again.buffer.unique().tolist()}")

    assert in_child(lambda: view_again(writes=False)).endswith("True [7]")
    assert in_child(lambda: view_again(writes=True)).endswith("False [7]")


def test_place_that_has_another_file_is_refused(copy: NodeCopy) -> None:
    place = copy.show()
    other = place.replace(f"[{os.getpid()},", f"[{os.getppid()},")
    for wrong in (other, place.replace("longstride", "another")):
        with pytest.raises(WeightSyncError, match="process with the copy of this node has ended"):
            CopyView(wrong, 3)


@needs_root
def test_memory_without_permission_is_unreachable(copy: NodeCopy) -> None:
    place = copy.show()

    def open_as_another_user() -> None:
        os.setuid(UNPRIVILEGED)
        CopyView(place, 3)

    assert in_child(open_as_another_user).startswith(CopyUnreachable.__name__)


def test_copy_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"share a copy of 1125899\.9 GB .* memory are free"):
        NodeCopy(1 << 50)


def test_memory_ends_with_its_last_user() -> None:
    copy = NodeCopy(NUM_BYTES)
    copy.version = 0
    view = CopyView(copy.show(), 0)
    assert len(shared_files()) == 1
    del copy
    assert len(shared_files()) == 1
    assert view.buffer.unique().tolist() == [0]
    del view
    assert shared_files() == set()


def shared_files() -> set[str]:
    """Return the names of the shared versions that this process has open or mapped."""
    gc.collect()  # Errors of earlier tests refer to theirs.
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # The descriptor of the folder itself.
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found |= {line.split(maxsplit=5)[-1].strip() for line in maps}
    return {each for each in found if "longstride-version" in each}


def test_killed_reader_lets_the_memory_change(copy: NodeCopy) -> None:
    place = copy.show()

    def end_with_a_view() -> None:
        view = CopyView(place, 3)
        os.kill(os.getpid(), 0 if copy.claim() else signal.SIGKILL)
        raise WeightSyncError(f"the memory of {view} could be claimed")

    assert in_child(end_with_a_view) == ""
    assert copy.claim()


def test_killed_writer_leaves_no_memory() -> None:
    places = multiprocessing.get_context("fork").SimpleQueue()

    def write_and_wait() -> None:
        copy = NodeCopy(NUM_BYTES)
        copy.version = 3
        places.put(copy.show())
        signal.pause()

    writer = os.fork()
    if writer == 0:
        write_and_wait()
    try:
        place = places.get()
        view = CopyView(place, 3)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert view.buffer.unique().tolist() == [0], "a reader goes on"
    with pytest.raises(WeightSyncError, match="process with the copy of this node has ended"):
        CopyView(place, 3)
    del view
    assert shared_files() == set()


@needs_root
def test_node_is_a_machine_or_a_network_namespace() -> None:
    here = node_id()
    assert len(here) == 16

    def compare(is_apart: bool) -> None:
        if is_apart:
            assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
        raise WeightSyncError("another" if node_id() != here else "the same")

    assert in_child(lambda: compare(False)).endswith("the same")
    assert in_child(lambda: compare(True)).endswith("another")
