"""A real engine on its own event loop, and what a learner needs to feed it, for the tests."""

import asyncio
import gc
import multiprocessing
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq.asyncio
from torch import Tensor
from transformers import Qwen3ForCausalLM

from actor.rollout.episode import Turn
from common.config.actor import ActorSection, AtUpdate
from common.config.algorithm import AlgorithmSection
from common.config.learner import FULL, LearnerSection, LoraSection, Precision, WeightsTransport
from common.config.model import ModelSection
from common.store.run_dir import RunDir
from common.wire.security import create_keys
from common.wire.sockets import Received, Router
from learner.policy.forward import Networks
from learner.policy.model import load_policy
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from learner.weights.publisher import Publisher
from learner.weights.source import PublishedWeights, policy_weights
from learner.weights.transfer import PublishSettings
from tests.actor.toy_peer import make_weight_link
from tests.learner.builders import snapshot, tensors_of
from tools.offline.config import SftSection
from tools.offline.scratch import make_policy, make_tokenizer, save_policy

if TYPE_CHECKING:  # importing vllm takes seconds, and most runs deselect these tests
    from actor.weights.receive import WeightLink

HOST = "127.0.0.1"
TIMEOUT_S = 3.0  # of a transfer that a test fails on purpose
PATIENT_S = 30.0  # of the others
BUCKET_BYTES = 100_000  # several buckets, which cut tensors
WAIT_S = 20.0  # for anything that should happen at once
FIRST_FORCED = 100  # the token that version 0 of the forced weights samples


class Listener(Router):
    """A router that records all received messages."""

    def __init__(self, keys: Any) -> None:
        super().__init__(keys, host=HOST, port=0)
        self.heard: list[Any] = []

    def receive_all(self, *, timeout_s: float, limit: int = 1_000) -> list[Received]:
        received = super().receive_all(timeout_s=timeout_s, limit=limit)
        self.heard += [one.message for one in received]
        return received


class Rig:
    """An engine, the trainer of the same policy, and the run directory between them."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        is_tied: bool,
        at_update: AtUpdate = AtUpdate.KEEP,
        lora: LoraSection = FULL,
        prepare: Callable[[Qwen3ForCausalLM], None] = lambda _: None,
        num_workers: int = 1,
        is_repeatable: bool = True,
        save: Callable[[Path], None] | None = None,
        algorithm: AlgorithmSection = AlgorithmSection(),  # noqa: B008 - it is frozen
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        from actor.engine.engine import Engine

        freeze_heap()
        self.dtype = getattr(torch, dtype)
        self.num_workers = num_workers
        self.at_update = at_update
        self.run_dir = RunDir(root=folder)
        self.keys = create_keys(self.run_dir.keys)
        if save is None:
            save_tiny_policy(folder / "policy", is_tied=is_tied, prepare=prepare)
        else:
            save(folder / "policy")
        path = str(folder / "policy")
        self.model = load_policy(path, device="cpu", lora=lora)
        precision = Precision.FP32 if dtype == "float32" else Precision.BF16
        settings = TrainerSettings(
            learner=LearnerSection(precision=precision),
            algorithm=algorithm,
            num_steps=1,
            engine_dtype=dtype,
        )
        self.trainer = Trainer(settings, Networks(policy=self.model))
        actor = ActorSection(
            max_concurrent=32,
            max_model_len=512,
            kv_at_update=at_update,
            tensor_parallel_size=num_workers,
            engine_args=engine_args or {},
        )
        self._runner = asyncio.Runner()
        start = Engine.start(
            ModelSection(path=path, dtype=dtype),
            actor,
            end_of_turn_ids=[],
            seed=0,
            lora=lora.in_engine,
            is_repeatable=is_repeatable,
            records_experts=algorithm.routing_replay,
        )
        self.engine = self._runner.run(start)
        # The answers of the engine's processes before their first token.
        self.tiles: list[str] = self._runner.run(self.engine._llm.collective_rpc("tiles"))

    def run(self, law: Coroutine[Any, Any, None]) -> None:
        """Run a test's coroutine on the engine's loop."""
        self._runner.run(law)

    def close(self) -> None:
        """End the engine's processes and the loop."""

        async def shut_down() -> None:
            self.engine.shut_down()

        self._runner.run(shut_down())
        self._runner.close()
        del self.engine
        gc.collect()  # what vLLM leaves to it, here and now

    # --- the learner's side -----------------------------------------------------------------

    @contextmanager
    def learner(self, *, keeps_versions: bool = False) -> Iterator[tuple[Publisher, Listener]]:
        """A publisher whose address is in the run directory, and its ear.

        Args:
            keeps_versions: send versions as changes, by gloo as to an engine on another node.
        """
        listener = Listener(self.keys)
        transport = WeightsTransport.GLOO if keeps_versions else WeightsTransport.AUTO
        settings = PublishSettings(
            host=HOST,
            timeout_s=PATIENT_S,
            max_canary_delta=0.05,
            bucket_bytes=BUCKET_BYTES,
            keeps_versions=keeps_versions,
            transport=transport,
        )
        publisher = Publisher(listener, settings)
        self.run_dir.publish_address("weights", f"tcp://{HOST}:{publisher.port}")
        publisher.start()
        try:
            yield publisher, listener
        finally:
            publisher.stop()

    @torch.no_grad()
    def randomize(self, seed: int) -> None:
        """Give the trainer's model other weights: large, so that mistakes are not small.

        Rounding grows with them. At 0.05 the log-probabilities have a spread of 0.4 nats, and a
        bf16 engine and a bf16 trainer are each 0.002 from exact arithmetic on average.
        """
        scale = 0.15 if self.dtype == torch.float32 else 0.05
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale, generator=generator)
            else:
                parameter.uniform_(0.8, 1.2, generator=generator)

    def _published(self) -> dict[str, Tensor]:
        return tensors_of(policy_weights(self.model, self.dtype))

    def weights(
        self, version: int, canary: list[list[int]] | None = None, *, spoil: str = ""
    ) -> PublishedWeights:
        """The trainer's weights, with canary scores; the tensor `spoil` is scaled on its way."""
        named = [
            (name, tensor * 4.0 if name == spoil else tensor)
            for name, tensor in self._published().items()
        ]
        assert not spoil or spoil in dict(named)
        token_ids = canary or []
        scores = self.trainer.score(token_ids) if token_ids else []
        return snapshot(version, named, canary_token_ids=token_ids, canary_logprobs=scores)

    def forced_weights(self, version: int) -> PublishedWeights:
        """Weights that always sample token FIRST_FORCED + version.

        Attention and MLP add nothing, all embeddings are equal, and the head has one token:
        its logit is the hidden size, 64, and all others are 0.
        """
        named = []
        for name, tensor in self._published().items():
            is_constant = "norm" in name or "embed" in name
            forced = torch.ones_like(tensor) if is_constant else torch.zeros_like(tensor)
            if "lm_head" in name:
                forced[FIRST_FORCED + version] = 1.0
            named.append((name, forced))
        return snapshot(version, named, canary_token_ids=[], canary_logprobs=[])

    # --- the actor's side -------------------------------------------------------------------

    @asynccontextmanager
    async def link(self) -> AsyncIterator[tuple["WeightLink", asyncio.Task[None]]]:
        """The actor's real link to the learner at the run directory's address, and its task."""
        context = zmq.asyncio.Context()
        link = make_weight_link(self, context, engine=self.engine, num_workers=self.num_workers)
        await link.connect(timeout_s=WAIT_S)
        task = asyncio.create_task(link.run())
        try:
            yield link, task
        finally:
            task.cancel()
            await asyncio.wait([task])
            link.close()
            context.destroy(linger=0)

    async def publish_first(
        self, publisher: Publisher, link: "WeightLink", weights: PublishedWeights
    ) -> None:
        """Publish what the engine gets when it joins, and wait until it has it."""
        await asyncio.to_thread(publisher.publish, weights)
        async with asyncio.timeout(WAIT_S):
            await link.version_loaded.wait()
        assert self.engine.version == weights.version

    def generate(self, name: str, prompt_ids: list[int], *, max_tokens: int) -> asyncio.Task[Turn]:
        """Start one request in the name space of the engine's version."""
        return asyncio.create_task(
            self.engine.generate(
                prompt_ids,
                request_id=name,
                max_tokens=max_tokens,
                salt=lambda: f"v{self.engine.version}",
            )
        )


@contextmanager
def forked_engines() -> Iterator[None]:
    """Start engines as forks of this process, which has imported vLLM; torch has one thread here.

    A role starts its engine as a new process, which imports vLLM again.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")  # A fork keeps the filters of the tests.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        forked = partial(multiprocessing.get_context, "fork")
        patch.setattr("vllm.v1.engine.utils.get_mp_context", forked)
        yield


def freeze_heap() -> None:
    """Leave vLLM's modules out of later collections: it collects garbage with every model."""
    gc.collect()
    gc.freeze()


class ExactEngine:
    """An engine in float32. It starts at its first use, and again once a test has ended it."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._rig: Rig | None = None

    def lend(self) -> Rig:
        """Return the engine. Its weights are those of the last test."""
        if self._rig is None:
            self._rig = Rig(self._new_folder(), dtype="float32", is_tied=False)
        return self._rig

    def end(self) -> None:
        """End the engine and its processes, if there are any."""
        if self._rig is not None:
            self._rig.close()
            self._rig = None


def save_tiny_policy(
    folder: Path, *, is_tied: bool, prepare: Callable[[Qwen3ForCausalLM], None] = lambda _: None
) -> None:
    # Two heads, because the engine has no attention kernel for heads of less than 32 on CPU.
    cfg = SftSection(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
    cfg = replace(cfg, intermediate_size=128, vocab_size=320)
    tokenizer = make_tokenizer(["go to the red ball", "pick up the grey key"], vocab_size=320)
    model = make_policy(cfg, tokenizer, seed=0)
    if is_tied:
        model.config.tie_word_embeddings = True
        model = Qwen3ForCausalLM(model.config)
    prepare(model)
    save_policy(folder, model, tokenizer)
