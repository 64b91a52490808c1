"""An actor whose workers receive as an engine's workers do: by the real staging, with copies."""

from pathlib import Path

import torch
import zmq
from torch import Tensor

from actor.weights.stage import Staging
from common.weights.buckets import CPU
from common.weights.messages import WeightsOffer
from common.weights.node_copy import node_id
from common.wire.security import RunKeys, load_keys
from tests.learner.weights.toy_actor import Actor


class KeepingActor(Actor):
    """Records the offers, and the tensors that each worker would load."""

    def __init__(
        self,
        keys: RunKeys,
        port: int,
        name: str,
        *,
        habit: str = "",
        num_workers: int = 1,
        node: str = "",
    ) -> None:
        super().__init__(keys, port, name, habit=habit, num_workers=num_workers, node=node)
        self._stagings = [Staging(CPU) for _ in range(num_workers)]
        self.offers: list[WeightsOffer] = []
        self.tensors: dict[int, list[Tensor]] = {}  # The first tensor at each worker, by version.

    def _receive_all(self, socket: zmq.Socket, offer: WeightsOffer) -> tuple[list[Tensor], str]:
        self.offers.append(offer)
        self._given_up.clear()
        for index, staging in enumerate(self._stagings):
            staging.begin(offer.of_worker(index))
        while not all(staging.state().is_done for staging in self._stagings):
            self._pump(socket)
            has_failed = any(staging.state().error for staging in self._stagings)
            if has_failed or self._given_up.is_set() or self._stop_requested.is_set():
                for staging in self._stagings:
                    staging.give_up()
        errors = [staging.state().error for staging in self._stagings]
        if any(errors):
            return [], "; ".join(filter(None, errors))
        each = [next(staging.tensors(offer.version))[1] for staging in self._stagings]
        self.tensors[offer.version] = [tensor.clone() for tensor in each]
        del each
        for staging in self._stagings:
            staging.memory.release()
        return self.tensors[offer.version], ""

    def damage_copy(self, worker: int) -> None:
        """Flip a bit of the last number in the copy of a worker that receives nothing now."""
        copy = self._stagings[worker].memory.own
        assert copy is not None
        copy.buffer[-1] ^= 1

    def free_copy(self, worker: int) -> None:
        """Let a worker lose its copy."""
        self._stagings[worker].free()

    @property
    def bases(self) -> list[tuple[int, int]]:
        """The version and the base of each offer."""
        return [(offer.version, offer.base) for offer in self.offers]

    def stop(self) -> None:
        super().stop()
        for staging in self._stagings:
            staging.leave()


def run_keeping_actor(keys: Path, host: str, port: int, name: str, node: str, num: int) -> None:
    """Be an actor with `num` workers, as the whole of a process."""
    actor = KeepingActor(load_keys(keys), port, name, num_workers=num, node=node)
    actor.learner_host = host
    actor.run()


def main(arguments: list[str]) -> None:
    """Be an actor of the node on which this process runs: keys, host, port, name, workers."""
    keys, host, port, name, num = arguments
    run_keeping_actor(Path(keys), host, int(port), name, node_id(), int(num))


def is_equal(found: list[Tensor], wanted: Tensor) -> bool:
    """Return whether every worker has exactly these numbers."""
    return all(torch.equal(each, wanted) for each in found)
