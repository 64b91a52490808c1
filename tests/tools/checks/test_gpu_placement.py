"""Laws of GPU placement, on machines of any size."""

import re

import pytest

from common.config.load import load_config
from common.errors import ConfigError
from common.host.machine import GIB, Gpu, WholeGpu, shown_gpus
from tools.checks.gpu_placement import GpuAssignment, assign_gpus, check_slices, visible_to

FOUND = [Gpu(name="H100", memory_bytes=80 * GIB, uuid=f"GPU-{i}") for i in range(4)]


def gpu(uuid: str, name: str, mib: int) -> Gpu:
    return Gpu(name=name, memory_bytes=mib << 20, uuid=uuid)


ALIKE = [
    WholeGpu(gpu=gpu("GPU-aa1", "NVIDIA H100", 81559)),
    WholeGpu(gpu=gpu("GPU-aa2", "NVIDIA H100", 81559)),
]
LISTED = [*ALIKE, WholeGpu(gpu=gpu("GPU-b", "NVIDIA L4", 23034))]


def gpus_of(num_gpus: int, *overrides: str) -> GpuAssignment:
    device = [] if any("device" in each for each in overrides) else ["learner.device=auto"]
    return assign_gpus(load_config("smoke", [*device, *overrides]), num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "learner", "actors"),
    [
        (1, [], (0,), [(0,)]),  # one for both
        (2, [], (0,), [(1,)]),
        (8, ["learner.num_ranks=4", "actor.num_actors=4"], (0, 1, 2, 3), [(4,), (5,), (6,), (7,)]),
        (4, ["actor.num_actors=3", "learner.num_ranks=2"], (0, 1), [(2,), (3,), (0,)]),
        (4, ["actor.placement=colocated", "learner.num_ranks=2"], (0, 1), [(0,)]),
        (4, ["actor.tensor_parallel_size=2", "learner.num_ranks=2"], (0, 1), [(2, 3)]),
        (3, ["actor.tensor_parallel_size=2", "learner.num_ranks=2"], (0, 1), [(2, 0)]),
        (2, ["learner.device=cpu"], (), [(0,)]),
        (2, ["learner.device=cuda:1"], (1,), [(0,)]),
        (2, ["actor.num_actors=0"], (0,), []),
    ],
)
def test_engines_and_learner_prefer_separate_gpus(
    num_gpus: int, overrides: list[str], learner: tuple[int, ...], actors: list[tuple[int, ...]]
) -> None:
    assert gpus_of(num_gpus, *overrides) == GpuAssignment(learner, tuple(actors))


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "words"),
    [
        (2, ["learner.num_ranks=3"], "learner.num_ranks=3 with learner.device=auto"),
        (2, ["learner.device=cuda:2"], "up to number 2, and this machine has 2"),
        (1, ["actor.tensor_parallel_size=2"], "actor.tensor_parallel_size=2: one engine needs"),
        (
            4,
            ["actor.placement=apart", "actor.num_actors=2", "learner.num_ranks=3"],
            "actor.num_actors=2 x actor.tensor_parallel_size=1 = 2 GPUs in"
            " addition to the learner's 3, and"
            " this machine has 4. Use actor.placement=colocated",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_numbers(
    num_gpus: int, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        gpus_of(num_gpus, *overrides)


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "processes"),
    [
        (5, [], [(1, 2), (3, 4)]),
        (3, ["actor.placement=colocated"], [(0, 1), (2, 0)]),
        (2, ["actor.placement=colocated"], [(0, 1), (0, 1)]),
        (9, ["actor.tensor_parallel_size=2"], [(1, 2, 3, 4), (5, 6, 7, 8)]),
        (4, ["actor.num_actors=1", "actor.engines_per_process=3"], [(1, 2, 3)]),
        (5, ["actor.num_actors=1", "actor.num_spares=1"], [(1, 2), (3, 4)]),
    ],
)
def test_process_of_several_engines_gets_the_gpus_of_all(
    num_gpus: int, overrides: list[str], processes: list[tuple[int, ...]]
) -> None:
    base = ["actor.num_actors=2", "actor.engines_per_process=2"]
    base = [each for each in base if each.split("=")[0] not in " ".join(overrides)]
    found = gpus_of(num_gpus, *base, *overrides)
    assert list(found.processes) == processes


def test_too_few_gpus_for_all_engines_of_processes_are_refused() -> None:
    overrides = ["actor.placement=apart", "actor.num_actors=2", "actor.engines_per_process=3"]
    words = "actor.num_actors=2 x actor.engines_per_process=3 x actor.tensor_parallel_size=1 = 6"
    with pytest.raises(ConfigError, match=re.escape(words)):
        gpus_of(4, *overrides)


def test_each_role_sees_its_own_gpus_only() -> None:
    assignment = GpuAssignment((1, 2), ((3,), (0, 3)))
    assert visible_to("learner", 0, assignment, FOUND) == {
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2"
    }
    assert visible_to("actor", 0, assignment, FOUND) == {"CUDA_VISIBLE_DEVICES": "GPU-3"}
    assert visible_to("actor", 1, assignment, FOUND) == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-3"}
    assert visible_to("envhub", 0, assignment, FOUND) == {"CUDA_VISIBLE_DEVICES": ""}
    assert visible_to("learner", 0, GpuAssignment((), ()), []) == {}


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aa1", "GPU-aa2", "GPU-b"]),
        ("2,0", ["GPU-b", "GPU-aa1"]),
        ("GPU-aa2", ["GPU-aa2"]),
        ("GPU-aa", []),  # of two
        ("0,7,1", ["GPU-aa1"]),  # nothing after an unknown one counts
        ("", []),
        ("-1", []),
    ],
)
def test_only_gpus_visible_to_cuda_are_counted(visible: str | None, uuids: list[str]) -> None:
    assert [gpu.uuid for gpu in shown_gpus(LISTED, visible)] == uuids


H100 = gpu("GPU-11aa", "NVIDIA H100 80GB HBM3", 81559)
SLICES = [
    gpu("MIG-41b35595-75b4", f"{H100.name} MIG 1g.10gb", 10240),
    gpu("MIG-9fd21e2b-8e5c", f"{H100.name} MIG 3g.40gb", 40960),
    gpu("MIG-9fd2aaaa-8e5c", f"{H100.name} MIG 1c.1g.10gb+me", 10240),
]
L4 = WholeGpu(gpu=gpu("GPU-22bb", "NVIDIA L4", 23034))
WHOLE = [WholeGpu(gpu=H100), L4]
SLICED = [WholeGpu(gpu=H100, slices=SLICES), L4]


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, [("MIG-41b3", 10), ("MIG-9fd21", 40), ("MIG-9fd2a", 10), ("GPU-22", 22)]),
        ("MIG-41b35595-75b4", [("MIG-41b3", 10)]),
        ("MIG-9fd21", [("MIG-9fd21", 40)]),
        ("MIG-9fd2", []),  # The beginning of two.
        ("MIG-77777777", []),
        ("MIG-41b3,1", [("MIG-41b3", 10), ("GPU-22", 22)]),
        ("0", [("MIG-41b3", 10)]),  # CUDA takes the first slice.
        ("GPU-11", [("MIG-41b3", 10)]),
        ("MIG-GPU-11aa/1/0", [("MIG-GPU-11aa/1/0", 0)]),  # Slices differ: its size is not known.
        ("MIG-GPU-33/1/0", []),
    ],
)
def test_mig_slice_counts_with_its_memory(
    visible: str | None, shown: list[tuple[str, int]]
) -> None:
    gpus = shown_gpus(SLICED, visible)
    assert [gpu.memory_bytes // GIB for gpu in gpus] == [gib for _, gib in shown]
    assert all(gpu.uuid.startswith(uuid) for gpu, (uuid, _) in zip(gpus, shown, strict=True))


@pytest.mark.parametrize("name", ["MIG-41b35595-75b4", "MIG-GPU-11aa/1/0"])
def test_unlisted_slice_counts_with_unknown_memory(name: str) -> None:
    (found,) = shown_gpus(WHOLE, name)
    assert (found.uuid, found.memory_bytes, found.is_slice) == (name, 0, True)


def test_unlike_gpus_are_numbered_by_bus() -> None:
    (first,) = shown_gpus(WHOLE[::-1], "0", "PCI_BUS_ID")
    assert first.name == "NVIDIA L4"


def test_fastest_first_order_requires_identical_gpus() -> None:
    with pytest.raises(ConfigError, match=r"^CUDA_DEVICE_ORDER=FASTEST_FIRST: .*H100.*L4"):
        shown_gpus(WHOLE, "0", "FASTEST_FIRST")
    (named,) = shown_gpus(WHOLE, "GPU-22", "FASTEST_FIRST")
    assert named.name == "NVIDIA L4"
    assert len(shown_gpus(ALIKE, "0", "FASTEST_FIRST")) == 1  # Two alike.


@pytest.mark.parametrize(
    "override", ["learner.num_ranks=2", "actor.tensor_parallel_size=2", "learner.device=cuda:1"]
)
def test_role_that_needs_two_slices_is_refused(override: str) -> None:
    gpus = shown_gpus(SLICED, None)
    check_slices(load_config("smoke", []), gpus)
    cfg = load_config("smoke", [override])
    with pytest.raises(
        ConfigError, match=re.escape(f"{override}: the GPUs of this machine are MIG slices")
    ):
        check_slices(cfg, gpus)
    check_slices(cfg, shown_gpus(WHOLE, None))
