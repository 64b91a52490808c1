"""Digests of the stages of a training step: they locate where two computations diverge."""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from common.text import counted
from common.weights.buckets import digest
from common.wire.messages import Trajectory
from learner.batch.batching import Sample
from learner.policy.lora import trained_state
from learner.policy.quantised_base import quantised_layers
from learner.training.ranks import Ranks
from learner.training.state import local_part

_ARRAYS = [each.name for each in fields(Trajectory) if "ndarray" in str(each.type)]
JOINED_BYTES = 256 << 20  # Largest size of the tensors that a GPU joins for one digest.
SHORT = 8  # Hexadecimal digits of a short digest, enough to detect a difference.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDigests:
    """The digests of one batch by stage; the first difference locates where two runs diverge."""

    episodes: list[str]  # Digest of each sample's episode as journaled.
    advantages: str  # Advantages of all tokens; with a critic also its value targets.
    minibatches: str  # Assignment of samples to updates.
    gradient: list[str]  # Gradient of each update over all ranks, before clipping.
    controller: str  # The controller's decision and its state afterwards.
    weights: str  # Trained weights of policy and critic after the step.


def first_difference(was: StepDigests, now: StepDigests, names: Sequence[str]) -> str:
    """Describe the first stage in which two computations of a batch differ; "" if none differs.

    Args:
        names: episode names in the batch's order.
    """
    if was.episodes != now.episodes:
        pairs = zip(names, was.episodes, now.episodes, strict=False)
        others = [name for name, theirs, ours in pairs if theirs != ours]
        counts = (
            f"the run trained on {counted(len(was.episodes), 'episode')}, but now there are"
            f" {len(now.episodes)}"
        )
        return f"batch: {'episode ' + ', '.join(others[:3]) if others else counts}"
    if was.advantages != now.advantages:
        return "advantage: the same episodes have different advantages"
    if was.minibatches != now.minibatches:
        return "batch: the same episodes are in different minibatches"
    pairs = zip(was.gradient, now.gradient, strict=False)
    first = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if first == 0:
        return "gradient: the same batch has a different gradient"
    if first is not None:
        return f"optimizer: update {first} of the batch differs, from the same gradient"
    if was.controller != now.controller or len(was.gradient) != len(now.gradient):
        return "controller: its decision or its state differs"
    if was.weights != now.weights:
        return "optimizer: the same gradients make different weights"
    return ""


class Digester:
    """Computes the digests of one batch after another, on every rank.

    Call order: `begin`, `prepared`, `gradient` once for each update, `finish`.
    """

    def __init__(
        self,
        ranks: Ranks,
        modules: Mapping[str, nn.Module],
        masters: Callable[[], Mapping[int, Tensor]] = dict,
    ) -> None:
        """Select the trained weights of `modules`, which are keyed by names in a checkpoint.

        Args:
            masters: returns masters of rounded weights, by the identity of these.
        """
        self._ranks = ranks
        self._masters = masters
        self._modules = modules
        self._episodes: list[str] = []
        self._advantages = self._minibatches = ""
        # Digests [2] int64 of this rank's gradients, one for each update.
        self._gradients: list[Tensor] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        """Digest the samples of a batch as received."""
        self._episodes = [_of_episode(sample.trajectory) for sample in samples]
        self._gradients = []

    def prepared(self, samples: Sequence[Sample], parts: Sequence[Sequence[int]]) -> None:
        """Digest the samples' final advantages and the minibatches of all epochs."""
        hashed = xxhash.xxh3_64()
        for sample in samples:
            hashed.update(sample.token_advantages().tobytes())
            if sample.value_targets is not None:
                hashed.update(sample.value_targets.tobytes())
        self._advantages = hashed.hexdigest()
        self._minibatches = _of_text(str([list(part) for part in parts]))

    def gradient(self) -> None:
        """Digest the gradient of one update."""
        self._gradients.append(_of_tensors(self._all_gradients()))

    def finish(self, controller: str) -> StepDigests:
        """Return the digests of the batch; all ranks must call this method together."""
        *gradients, weights = self._whole([*self._gradients, _of_tensors(self._exact_weights())])
        return StepDigests(
            episodes=self._episodes,
            advantages=self._advantages,
            minibatches=self._minibatches,
            gradient=[each[:SHORT] for each in gradients],
            controller=_of_text(controller),
            weights=weights,
        )

    def standing(self, frozen: Iterable[nn.Module]) -> tuple[str, str]:
        """Return the checksums of trained and of frozen weights; all ranks must call it together.

        Args:
            frozen: networks whose untrained weights make the second checksum.
        """
        trained_ids = {id(tensor) for tensor in self._weights()}
        frozen = list(frozen)
        others = (t for network in frozen for t in network.state_dict(keep_vars=True).values())
        fixed = [tensor for tensor in others if id(tensor) not in trained_ids]
        quantised = (layer.weight for each in frozen for _, layer in quantised_layers(each))
        fixed += [tensor for each in quantised for tensor in (each.codes, each.scales)]
        trained, rest = self._whole([_of_tensors(self._exact_weights()), _of_tensors(fixed)])
        return trained, rest

    def _weights(self) -> Iterator[Tensor]:
        """Yield the trained tensors, tied weights once."""
        tensors = (t for module in self._modules.values() for t in trained_state(module).values())
        yield from {id(tensor): tensor for tensor in tensors}.values()

    def _exact_weights(self) -> Iterator[Tensor]:
        """Yield the trained tensors, masters in place of rounded weights."""
        masters = self._masters()
        for tensor in self._weights():
            yield masters.get(id(tensor), tensor)

    def _all_gradients(self) -> Iterator[Tensor]:
        """Yield the gradients of all trained weights."""
        for module in self._modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    yield parameter.grad

    def _whole(self, digests: list[Tensor]) -> list[str]:
        """Combine the digests of all ranks and return them as hexadecimal text."""
        of_all = torch.zeros(self._ranks.size, len(digests), 2, dtype=torch.int64)
        of_all[self._ranks.index] = torch.stack(digests)
        of_all = self._ranks.sum(of_all)
        return [
            xxhash.xxh3_128(of_all[:, index].numpy().tobytes()).hexdigest()
            for index in range(len(digests))
        ]


def _of_text(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()


def _of_episode(trajectory: Trajectory) -> str:
    """Return the digest of a trajectory's numbers and arrays."""
    t = trajectory
    numbers = (t.episode_id, t.env, t.reward, t.num_turns, t.num_invalid_actions)
    if t.start_score:  # Earlier journals have no start score.
        numbers = (*numbers, t.start_score)
    hashed = xxhash.xxh3_64(repr(numbers).encode())
    for name in _ARRAYS:
        value: np.ndarray | None = getattr(t, name)
        # Arrays of later versions are empty in earlier journals.
        if value is not None and value.size:
            hashed.update(name.encode())
            hashed.update(value.tobytes())
    return hashed.hexdigest()[:SHORT]


@torch.no_grad()
def _of_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Return the digest [2] int64 of this rank's parts of tensors, on the CPU."""
    parts = [digest(each) for each in _buffers(local_part(each) for each in tensors)]
    if not parts:
        return torch.zeros(2, dtype=torch.int64)
    joined = torch.cat([part.to(parts[0].device) for part in parts]).cpu()
    hashed = bytearray(xxhash.xxh3_128(joined.numpy().tobytes()).digest())
    return torch.frombuffer(hashed, dtype=torch.int64)


def _buffers(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of tensors: on a CPU each alone, elsewhere small adjacent ones joined.

    A digest on a GPU takes about twenty kernels, whose starts would cost more than the arithmetic.
    """
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        is_alone = content.device.type == "cpu"
        if waiting and (is_alone or size + content.numel() > JOINED_BYTES):
            yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            waiting = []
            size = 0
        if is_alone:
            yield content
        else:
            waiting.append(content)
            size += content.numel()
    if waiting:
        yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
