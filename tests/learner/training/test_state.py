"""Laws of a trainer's tensors on disk: any number of ranks reads what any number has written."""

import contextlib
import json
import os
import pickle
import resource
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from common.config.learner import CriticKind, CriticSection, LearnerSection
from common.errors import ConfigError
from learner.policy.model import make_critic
from learner.policy.sharding import shard
from learner.training import storage
from learner.training.optimizer import make_critic_optimizer, make_optimizer
from learner.training.ranks import Ranks
from learner.training.state import StateWriter, live_tensors, read_weights, restore
from learner.training.storage import convert_pickled_index
from tests.bounds import at_most
from tests.learner.builders import make_model
from tests.learner.policy.test_loading import rank_of


def make_parts(folder: Path, seed: int) -> tuple[dict[str, nn.Module], list[Any]]:
    """Return policy and critic, and what will train them."""
    policy: Any = make_model(seed=seed)
    policy.save_pretrained(folder / str(seed))
    cfg = LearnerSection(lr=1e-2, critic=CriticSection(kind=CriticKind.MODEL))
    critic = make_critic(cfg.critic, policy, policy_path=str(folder / str(seed)))
    return {"model": policy, "critic": critic}, [policy, critic, cfg]


def optimizers_of(made: list[Any]) -> list[torch.optim.Optimizer]:
    policy, critic, cfg = made
    makers = (make_optimizer(policy, cfg), make_critic_optimizer(critic, cfg))
    return [each for made in makers for each in made.optimizers]


def train_once(optimizers: list[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(3)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_ranks_read_the_state_of_one(tmp_path: Path, size: int) -> None:
    modules, made = make_parts(tmp_path, seed=1)
    optimizers = optimizers_of(made)
    train_once(optimizers)
    written = {name: each.detach() for name, each in live_tensors(modules, optimizers).items()}
    StateWriter(Ranks()).start(written, tmp_path / "state").result(60)
    assert sum("exp_avg_sq" in name for name in written) == sum("exp_avg" in n for n in written) / 2
    others, made = make_parts(tmp_path, seed=2)
    with rank_of(size) as mesh:
        for module in others.values():
            shard(module, mesh, dtype=torch.float32)
        optimizers = optimizers_of(made)
        rates = [group["lr"] for each in optimizers for group in each.param_groups]
        restore(tmp_path / "state", others, optimizers)
        assert [group["lr"] for each in optimizers for group in each.param_groups] == rates
        tensors = live_tensors(others, optimizers)
        assert tensors.keys() == written.keys()
        for name, part in tensors.items():
            want, local = written[name], part.detach()
            if isinstance(local, DTensor):
                local, want = local.to_local(), want[: -(-len(want) // size)]
            assert torch.equal(local, want), name
        assert all(each.grad is None for module in others.values() for each in module.parameters())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    StateWriter(Ranks()).start({"model.weight": torch.zeros(3)}, tmp_path / "state").result(60)
    with pytest.raises(ConfigError, match="do not fit this model"):
        restore(tmp_path / "state", {"model": nn.Linear(2, 2, bias=False)}, [])


def test_written_copies_are_those_on_the_disk(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    written = StateWriter(Ranks()).start({"model.a": tensor, "optimizer.a.b": tensor}, tmp_path)
    tensor.fill_(9.0)  # The next step.
    copies = written.result(60)
    assert copies is not None
    assert {name: each.tolist() for name, each in copies.items()} == {
        "model.a": [0, 1, 2],
        "optimizer.a.b": [0, 1, 2],
    }
    ((name, found),) = read_weights(tmp_path, "model")
    assert (name, found.tolist()) == ("a", [0, 1, 2])


class Planted:
    """A value whose pickle writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self._marker, "executed")


@pytest.mark.parametrize("where", ["whole", "entry", "key", "state of a class"])
def test_pickle_in_the_index_of_a_checkpoint_executes_nothing(tmp_path: Path, where: str) -> None:
    save({"model.a": torch.ones(2)}, checkpoint_id=tmp_path / "state", no_dist=True)
    file = tmp_path / "state" / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    planted: Any = Planted(tmp_path / "marker")
    match where:
        case "whole":
            metadata = planted
        case "entry":
            metadata.state_dict_metadata["model.a"] = planted
        case "key":
            metadata.storage_data[planted] = 1
        case _:
            metadata.state_dict_metadata["model.a"].chunks[0].sizes = planted
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        ConfigError, match=r"\.metadata: damaged, it names pathlib\.Path\.write_text"
    ):
        dict(read_weights(tmp_path / "state", "model"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFFF) + b".", "'storage_data'"),
        (b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.", "a key is no text"),
        (b"\x80\x02ctorch\nSize\n)}\x92.", "no operation NEWOBJ_EX"),
        (b"\x80\x02\x82\x01.", "no operation EXT1"),
        (b"Pa\n.", "no operation PERSID"),
        (b"\x80\x02K\x01)R.", "an object of no kind"),
        (b"\x80\x02ctorch\nSize\n}b.", "it fills a _Name"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".", "only 1 remain"),
    ],
)
def test_pickle_takes_no_memory_and_ends_no_process(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        dict(read_weights(tmp_path / "state", "model"))


def test_bytes_among_the_tensors_of_a_checkpoint_execute_nothing(tmp_path: Path) -> None:
    """torch unpickles an entry of bytes when it loads the checkpoint."""
    planted: Any = Planted(tmp_path / "marker")
    save({"model.a": planted}, checkpoint_id=tmp_path / "state", no_dist=True)
    with pytest.raises(ConfigError, match="BytesStorageMetadata"):
        dict(read_weights(tmp_path / "state", "model"))
    assert not (tmp_path / "marker").exists()


def test_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    """The index names the classes of that version, of which `StoredTensor` had five fields."""
    save({"model.a": torch.tensor([[5.0, 6.0]])}, checkpoint_id=tmp_path / "state", no_dist=True)
    file = tmp_path / "state" / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    (key,) = metadata.storage_data
    old = OldStoredTensor("__0_0.bin", 0, 8, torch.float32, (1, 2))
    metadata.storage_data = {key: old}
    with as_stored_tensor():
        file.write_bytes(pickle.dumps(metadata))
    (tmp_path / "state" / "__0_0.bin").write_bytes(struct.pack("<2f", 1.5, -2.0))
    ((name, weight),) = read_weights(tmp_path / "state", "model")
    assert (name, weight.tolist()) == ("a", [[1.5, -2.0]])
    convert_pickled_index(tmp_path / "state")
    file.unlink()
    ((name, weight),) = read_weights(tmp_path / "state", "model")
    assert (name, weight.tolist()) == ("a", [[1.5, -2.0]])


@dataclass(frozen=True, slots=True)
class OldStoredTensor:
    """The class `StoredTensor` of an older version."""

    relative_path: str
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@contextlib.contextmanager
def as_stored_tensor() -> Iterator[None]:
    """Give `OldStoredTensor` the name that it had in its version."""
    before = storage.StoredTensor
    OldStoredTensor.__module__ = storage.__name__
    OldStoredTensor.__qualname__ = OldStoredTensor.__name__ = "StoredTensor"
    storage.StoredTensor = OldStoredTensor  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        storage.StoredTensor = before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"file": "../a"}, "not a plain file name"),
        ({"file": "/etc/passwd"}, "not a plain file name"),
        ({"offsets": [1]}, "outside of the tensor"),
        ({"offsets": [-1]}, "greater than or equal to 0"),
        ({"shape": [2, 1]}, "number of dimensions"),
        ({"num_bytes": 4}, "not the bytes of a part"),
        ({"num_bytes": 1 << 62, "is_archive": True}, "does not fit"),
    ],
)
def test_index_with_a_wrong_part_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    StateWriter(Ranks()).start({"model.a": torch.ones(2)}, tmp_path / "state").result(60)
    file = tmp_path / "state" / "tensors.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    index["model.a"]["parts"][0] |= change
    file.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        dict(read_weights(tmp_path / "state", "model"))


def test_index_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    StateWriter(Ranks()).start({"model.a": torch.ones(2)}, tmp_path / "state").result(60)
    file = tmp_path / "state" / "tensors.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    index["model.a"]["parts"] = []
    file.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks parts of"):
        dict(read_weights(tmp_path / "state", "model"))


def test_parts_that_overlap_hide_no_missing_number(tmp_path: Path) -> None:
    StateWriter(Ranks()).start({"model.a": torch.ones(2)}, tmp_path / "state").result(60)
    file = tmp_path / "state" / "tensors.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    (part,) = index["model.a"]["parts"]
    index["model.a"]["parts"] = [part | {"shape": [1], "num_bytes": 4}] * 2
    file.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match="two parts overlap"):
        dict(read_weights(tmp_path / "state", "model"))


def test_tensors_of_the_standard_writer_are_read(tmp_path: Path) -> None:
    save({"model.a": torch.tensor([1.0, 2.0])}, checkpoint_id=tmp_path, no_dist=True)
    ((name, found),) = read_weights(tmp_path, "model")
    assert (name, found.tolist()) == ("a", [1.0, 2.0])


def test_tensors_of_any_type_and_shape_are_read_back(tmp_path: Path) -> None:
    tensors = {
        "model.scalar": torch.tensor(3.0),
        "model.empty": torch.zeros(0, 4),
        "model.turned": torch.arange(6).view(2, 3).T,
        "model.half": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        "model.codes": torch.tensor([-128, 127], dtype=torch.int8),
    }
    StateWriter(Ranks()).start(tensors, tmp_path).result(60)
    found = dict(read_weights(tmp_path, "model"))
    assert {name: each.tolist() for name, each in found.items()} == {
        "scalar": 3.0,
        "empty": [],
        "turned": [[0, 3], [1, 4], [2, 5]],
        "half": [[1.5], [-2.0]],
        "codes": [-128, 127],
    }
    assert found["half"].dtype is torch.bfloat16


def test_file_with_lost_bytes_is_refused(tmp_path: Path) -> None:
    StateWriter(Ranks()).start({"model.a": torch.ones(3)}, tmp_path).result(60)
    (file,) = tmp_path.glob("*.bin")
    os.truncate(file, 11)
    with pytest.raises(ConfigError, match="ends within a tensor"):
        dict(read_weights(tmp_path, "model"))


def cpu_s_of(write: Callable[[], object]) -> float:
    started = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    write()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - started


@pytest.mark.long
@pytest.mark.slow
def test_state_takes_a_fraction_of_the_standard_writers_cpu_time(tmp_path: Path) -> None:
    tensors = {f"model.{number}": torch.full((50_000,), 1.0) for number in range(2_000)}
    writer = StateWriter(Ranks())
    writer.start(tensors, tmp_path / "first").result(60)  # Allocates the copies.
    ours = cpu_s_of(lambda: writer.start(tensors, tmp_path / "ours").result(60))
    theirs = cpu_s_of(lambda: save(tensors, checkpoint_id=tmp_path / "theirs", no_dist=True))
    assert ours < 0.6 * theirs, (ours, theirs)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timed
def test_checkpoint_beside_a_busy_loop_stays_near_plain_writes(tmp_path: Path) -> None:
    state = {f"model.{number}": torch.randn(75_000) for number in range(1_000)}  # 300 MB
    content = b"".join(each.numpy().tobytes() for each in state.values())
    writer = StateWriter(Ranks())
    writer.start(state, tmp_path / "first").result(60)  # Allocates the copies.
    plain: list[float] = []
    ours: list[float] = []
    longest: list[float] = []
    for number in range(3):
        plain.append(plain_write_s(tmp_path / f"{number}.plain", content))
        started = time.perf_counter()
        written = writer.start(state, tmp_path / str(number))
        longest.append(longest_round_s(written))
        ours.append(time.perf_counter() - started)
    assert min(ours) < at_most(2 * min(plain) + 0.5), (ours, plain)
    assert min(longest) < at_most(0.1), longest


def plain_write_s(path: Path, content: bytes) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    return time.perf_counter() - started


def longest_round_s(written: Future[Any]) -> float:
    """Return the longest round of a loop that uses Python and torch until a write is complete."""
    longest = 0.0
    square = torch.eye(256)
    while not written.done():
        started = time.perf_counter()
        square = torch.tanh(square @ square)
        sum(number * number for number in range(3_000))
        longest = max(longest, time.perf_counter() - started)
    written.result()
    return longest


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timed
def test_adapters_are_written_nearly_as_fast_as_plain_bytes(tmp_path: Path) -> None:
    state = {
        f"{kind}.layers.{number}.{name}": torch.randn(100_000)
        for number in range(200)
        for kind, name in (("model", "w"), ("optimizer.model", "m"), ("optimizer.model", "v"))
    }
    content = b"".join(each.numpy().tobytes() for each in state.values())  # 240 MB
    writer = StateWriter(Ranks())
    plain: list[float] = []
    ours: list[float] = []
    for number in range(3):
        plain.append(plain_write_s(tmp_path / f"{number}.plain", content))
        started = time.perf_counter()
        writer.start(state, tmp_path / str(number)).result(60)
        ours.append(time.perf_counter() - started)
    assert min(ours) < at_most(2 * min(plain) + 1.0), (ours, plain)
