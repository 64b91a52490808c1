"""Digests of what each stage of a training step worked on: where two computations part ways."""
# torch's type stubs know nothing of numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from common.wire.messages import Trajectory
from common.wire.transfer.digest import digest
from learner.batch.batching import Sample
from learner.policy.lora import trained_state
from learner.training.ranks import Ranks
from learner.training.state import local_part

_ARRAYS = [each.name for each in fields(Trajectory) if "ndarray" in str(each.type)]
SHORT = 8  # hexadecimal digits of what is only to be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDigests:
    """The stages of one batch in order; the first that differs is where a difference began."""

    episodes: list[str]  # of each sample: what the journal says of it
    advantages: str  # of all tokens; with a critic its targets, too
    minibatches: str  # which samples make which update
    gradient: list[str]  # of each update, over all ranks, before it is clipped
    controller: str  # its decision, and its state after it
    weights: str  # those that are trained, of policy and critic, after the step


def first_difference(was: StepDigests, now: StepDigests, names: Sequence[str]) -> str:
    """Return the first stage in which two computations of a batch differ, in words; "" if none.

    Args:
        names: of the episodes, in the batch's order.
    """
    if was.episodes != now.episodes:
        pairs = zip(names, was.episodes, now.episodes, strict=False)
        others = [name for name, theirs, ours in pairs if theirs != ours]
        counts = f"{len(was.episodes)} episodes were trained on, {len(now.episodes)} are there"
        return f"batch: {'episode ' + ', '.join(others[:3]) if others else counts}"
    if was.advantages != now.advantages:
        return "advantage: the same episodes have other advantages"
    if was.minibatches != now.minibatches:
        return "batch: the same episodes are in other minibatches"
    pairs = zip(was.gradient, now.gradient, strict=False)
    first = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if first == 0:
        return "gradient: the same batch has another gradient"
    if first is not None:
        return f"optimizer: update {first} of the batch, from the same gradient"
    if was.controller != now.controller or len(was.gradient) != len(now.gradient):
        return "controller: it decides otherwise, or remembers otherwise"
    if was.weights != now.weights:
        return "optimizer: the same gradients make other weights"
    return ""


class Digester:
    """Takes the digests of one batch after the other, on every rank.

    Example: begin -> prepared -> gradient, once for each update -> finish.
    """

    def __init__(self, ranks: Ranks, modules: Mapping[str, nn.Module]) -> None:
        """Watch what is trained: `modules` by their names in a checkpoint."""
        self._ranks = ranks
        self._modules = modules
        self._episodes: list[str] = []
        self._advantages = self._minibatches = ""
        self._gradients: list[Tensor] = []  # [2] int64 each, of this rank

    def begin(self, samples: Sequence[Sample]) -> None:
        """Take the samples of a batch as they came."""
        self._episodes = [_of_episode(sample.trajectory) for sample in samples]
        self._gradients = []

    def prepared(self, samples: Sequence[Sample], parts: Sequence[Sequence[int]]) -> None:
        """Take the samples with their final advantages, and the minibatches of all epochs."""
        hashed = xxhash.xxh3_64()
        for sample in samples:
            hashed.update(sample.token_advantages().tobytes())
            if sample.value_targets is not None:
                hashed.update(sample.value_targets.tobytes())
        self._advantages = hashed.hexdigest()
        self._minibatches = _of_text(str([list(part) for part in parts]))

    def gradient(self) -> None:
        """Take the gradient of one update."""
        self._gradients.append(_of_tensors(self._all_gradients()))

    def finish(self, controller: str) -> StepDigests:
        """Return the digests of the batch; all ranks call this together."""
        *gradients, weights = self._whole([*self._gradients, _of_tensors(self._weights())])
        return StepDigests(
            episodes=self._episodes,
            advantages=self._advantages,
            minibatches=self._minibatches,
            gradient=[each[:SHORT] for each in gradients],
            controller=_of_text(controller),
            weights=weights,
        )

    def standing(self, frozen: Iterable[nn.Module]) -> tuple[str, str]:
        """Return the checksums of what is trained, and of what is not; all ranks together.

        Args:
            frozen: networks whose weights, but for those that are trained, are the second.
        """
        own = {id(tensor) for tensor in self._weights()}
        others = (t for network in frozen for t in network.state_dict(keep_vars=True).values())
        fixed = [tensor for tensor in others if id(tensor) not in own]
        trained, rest = self._whole([_of_tensors(self._weights()), _of_tensors(fixed)])
        return trained, rest

    def _weights(self) -> Iterator[Tensor]:
        """Yield what is trained, tied weights once."""
        found = (t for module in self._modules.values() for t in trained_state(module).values())
        yield from {id(tensor): tensor for tensor in found}.values()

    def _all_gradients(self) -> Iterator[Tensor]:
        for module in self._modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    yield parameter.grad

    def _whole(self, own: list[Tensor]) -> list[str]:
        """Return digests of all ranks' parts as text."""
        of_all = torch.zeros(self._ranks.size, len(own), 2, dtype=torch.int64)
        of_all[self._ranks.index] = torch.stack(own)
        of_all = self._ranks.sum(of_all)
        return [
            xxhash.xxh3_128(of_all[:, index].numpy().tobytes()).hexdigest()
            for index in range(len(own))
        ]


def _of_text(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()


def _of_episode(trajectory: Trajectory) -> str:
    t = trajectory
    numbers = (t.episode_id, t.env, t.reward, t.num_turns, t.num_invalid_actions)
    if t.start_score:  # absent in earlier journals
        numbers = (*numbers, t.start_score)
    hashed = xxhash.xxh3_64(repr(numbers).encode())
    for name in _ARRAYS:
        value: np.ndarray | None = getattr(t, name)
        if value is not None and value.size:  # what later versions add is empty in earlier journals
            hashed.update(name.encode())
            hashed.update(value.tobytes())
    return hashed.hexdigest()[:SHORT]


@torch.no_grad()
def _of_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Return the digest [2] int64 of this rank's parts of tensors, on the CPU."""
    parts = [digest(_as_bytes(local_part(each))) for each in tensors if local_part(each).numel()]
    if not parts:
        return torch.zeros(2, dtype=torch.int64)
    joined = torch.cat([part.to(parts[0].device) for part in parts]).cpu()
    hashed = bytearray(xxhash.xxh3_128(joined.numpy().tobytes()).digest())
    return torch.frombuffer(hashed, dtype=torch.int64)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
