"""Laws of the GPUs that each engine of a process gets."""

from actor.main import gpus_of


def test_each_engine_of_a_process_gets_its_own_gpus() -> None:
    shown = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert [gpus_of(i, shown, width=1) for i in range(4)] == [[each] for each in shown]
    assert [gpus_of(i, shown, width=2) for i in range(2)] == [shown[:2], shown[2:]]


def test_engines_share_gpus_only_when_there_are_too_few() -> None:
    assert [gpus_of(i, ["GPU-0", "GPU-1"], width=1) for i in range(3)] == [
        ["GPU-0"],
        ["GPU-1"],
        ["GPU-0"],
    ]
    assert gpus_of(1, ["GPU-0", "GPU-1", "GPU-2"], width=2) == ["GPU-2", "GPU-0"]
    assert gpus_of(0, ["GPU-0"], width=2) == ["GPU-0"]
