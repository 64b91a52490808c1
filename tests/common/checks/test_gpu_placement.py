"""Laws of who gets which GPU, on machines of any size."""

import re
from pathlib import Path

import pytest

from common.checks.gpu_placement import Seats, seat, visible_to
from common.checks.machine import GIB, Gpu, shown_gpus
from common.config.load import load_config
from common.errors import ConfigError

FOUND = [Gpu(name="H100", memory_bytes=80 * GIB, uuid=f"GPU-{i}") for i in range(4)]
LINES = ["GPU-aa1, NVIDIA H100, 81559", "GPU-aa2, NVIDIA H100, 81559", "GPU-b, odd, name, [N/A]"]


def seats_of(repository: Path, num_gpus: int, *overrides: str) -> Seats:
    device = [] if any("device" in each for each in overrides) else ["learner.device=auto"]
    return seat(load_config("smoke", [*device, *overrides], root=repository), num_gpus=num_gpus)


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
def test_engines_are_apart_from_the_learner_while_there_are_gpus(
    num_gpus: int,
    overrides: list[str],
    learner: tuple[int, ...],
    actors: list[tuple[int, ...]],
    repository: Path,
) -> None:
    assert seats_of(repository, num_gpus, *overrides) == Seats(learner, tuple(actors))


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "words"),
    [
        (2, ["learner.num_ranks=3"], "learner.num_ranks=3 with learner.device=auto"),
        (2, ["learner.device=cuda:2"], "up to number 2, and 2 answer"),
        (1, ["actor.tensor_parallel_size=2"], "actor.tensor_parallel_size=2: one engine needs"),
        (
            4,
            ["actor.placement=apart", "actor.num_actors=2", "learner.num_ranks=3"],
            "actor.num_actors=2 x actor.tensor_parallel_size=1 = 2 GPUs beside the learner's 3, and"
            " 4 answer; actor.placement=colocated",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_the_arithmetic(
    num_gpus: int, overrides: list[str], words: str, repository: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        seats_of(repository, num_gpus, *overrides)


def test_each_role_sees_its_own_gpus_only() -> None:
    seats = Seats((1, 2), ((3,), (0, 3)))
    assert visible_to("learner", 0, seats, FOUND) == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2"}
    assert visible_to("actor", 0, seats, FOUND) == {"CUDA_VISIBLE_DEVICES": "GPU-3"}
    assert visible_to("actor", 1, seats, FOUND) == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-3"}
    assert visible_to("envhub", 0, seats, FOUND) == {"CUDA_VISIBLE_DEVICES": ""}
    assert visible_to("learner", 0, Seats((), ()), []) == {}


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
def test_only_gpus_that_cuda_would_show_are_counted(visible: str | None, uuids: list[str]) -> None:
    assert [gpu.uuid for gpu in shown_gpus(LINES, visible)] == uuids


def test_name_and_memory_are_read_where_they_are_told() -> None:
    first, _, odd = shown_gpus(LINES, None)
    assert (first.name, first.memory_bytes) == ("NVIDIA H100", 81559 << 20)
    assert (odd.name, odd.memory_bytes) == ("odd, name", 0)
