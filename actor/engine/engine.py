"""The generation engine: vLLM's AsyncLLM, token ids in, token ids out, weights taken in flight."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from actor.engine.adapter import REQUEST, adapter_at
from actor.engine.concurrency import EngineLoad
from actor.engine.process_watch import ProcessWatch
from actor.engine.staging import Staged
from actor.engine.start import shut_down_llm, start_llm
from actor.rollout.episode import Turn
from common.config.compute import FULL, LoraSection
from common.config.run_config import ActorSection, AtUpdate, ModelSection
from common.errors import EngineError, WeightSyncError
from common.store.status.startup_history import StartupHistory
from common.wire.codec import encode
from common.wire.weight_group import TransferCancelled
from common.wire.weight_messages import WeightsOffer

logger = logging.getLogger(__name__)

SHUTDOWN_S = 1.0  # until the engine's processes are killed; they hold nothing worth saving
LOAD_S = 60.0  # for the engine to stand still, and to load what it has received
LAST_WORDS_S = 1.0  # for the other workers, once one has failed
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.1  # between looks whether a version is staged


class Engine:
    """One vLLM engine and the version of its weights.

    Example:
        engine = await Engine.start(model_cfg, actor_cfg, end_of_turn_ids=[3], seed=0)
        turn = await engine.generate([1, 5, 9], request_id="a", max_tokens=16, salt="v3")
        stage_s = await engine.stage(offer)     its bytes arrive while generation goes on
        pause_s = await engine.load(offer)      generation freezes, loads, goes on where it was

    After an update that ended in the middle nothing is sampled until another one is loaded whole.
    """

    def __init__(
        self, llm: AsyncLLM, cfg: ActorSection, *, end_of_turn_ids: list[int], watch: ProcessWatch
    ) -> None:
        self._llm = llm
        self._watch = watch
        self.meter: EngineLoad | None = None
        self._cfg = cfg
        self._end_of_turn_ids = end_of_turn_ids
        self._takes_adapters = False
        self._named = REQUEST
        self.version = -1  # nothing received yet
        self.num_sampled_tokens = 0
        self.frozen_s = 0.0  # in all, to load weights
        self.num_running = 0
        self._is_whole = asyncio.Event()  # all of its weights are of one version
        self._is_whole.set()
        self._asked_at: float | None = None  # since when workers that receive owe an answer

    @classmethod
    async def start(
        cls,
        model: ModelSection,
        cfg: ActorSection,
        *,
        end_of_turn_ids: list[int],
        seed: int,
        meters_load: bool = False,
        has_weights: bool = True,
        lora: LoraSection = FULL,
        is_repeatable: bool = False,
    ) -> "Engine":
        """Start the engine processes and warm them up; without weights they are random at first.

        With a `lora` of a rank above 0 it takes adapters to the weights that it has. Requests with
        seeds of their own need `is_repeatable`.

        Raises: EngineError: it did not start, or is not able to sample.
        """
        started = time.monotonic()
        usual, what = StartupHistory(), f"engine {model.path} {model.dtype}"
        takes = f", which takes about {s:.0f} s here" if (s := usual.seconds(what)) else ""
        logger.info("engine is starting%s", takes)
        meter = EngineLoad() if meters_load else None
        llm, watch = start_llm(
            model,
            cfg,
            seed=seed,
            meter=meter,
            has_weights=has_weights,
            lora=lora,
            is_repeatable=is_repeatable,
        )
        engine = cls(llm, cfg, end_of_turn_ids=end_of_turn_ids, watch=watch)
        engine.meter = meter
        engine._takes_adapters = lora.rank > 0
        problem = await engine._warm_up(timeout_s=cfg.start_timeout_s)
        if problem:
            engine.shut_down()
            raise EngineError(f"engine did not start: {problem}")
        (tiles, *_) = await llm.collective_rpc("tiles")
        took_s = time.monotonic() - started
        usual.note(what, took_s)
        logger.info("engine ready took_s=%.1f amx_tiles=%s", took_s, tiles)
        return engine

    async def _warm_up(self, *, timeout_s: float) -> str:
        """Sample two tokens, which initialises what is lazy; return what went wrong, or ""."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.generate([0, 0], request_id="warm-up", max_tokens=2, salt="warm-up")
        except TimeoutError:
            return f"no first token within {timeout_s:g}s"
        except EngineError as error:
            return str(error)
        return ""

    async def device_ids(self) -> list[str]:
        """Return the names of the engine's GPUs, one per worker; "" for a CPU."""
        async with self._bounded("naming its devices", self._cfg.turn_timeout_s):
            return cast(list[str], await self._llm.collective_rpc("device_id"))

    @asynccontextmanager
    async def _bounded(self, doing: str, timeout_s: float) -> AsyncIterator[None]:
        """Give the engine a deadline, and say what is wrong with one that misses it or dies."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise EngineError(f"engine hangs: {doing} takes over {timeout_s:g}s") from None
        except EngineDeadError:
            raise EngineError(f"engine died: {await self._watch.describe_death()}") from None

    @property
    def is_whole(self) -> bool:
        """Whether all of its weights are of one version; else it samples nothing."""
        return self._is_whole.is_set()

    @property
    def quiet_s(self) -> float:
        """Seconds for which the workers have not answered while they receive a version."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def _adapter(self) -> LoRARequest | None:
        """What every request names; nothing before the first version."""
        return self._named if self._takes_adapters and self.version >= 0 else None

    def take_adapter_at(self, folder: Path) -> None:
        """Sample with the adapter in a folder, which peft wrote, instead of a published one."""
        self._named = adapter_at(folder)

    def _sampling(
        self, max_tokens: int, seed: int | None = None, *, temperature: float | None = None
    ) -> SamplingParams:
        return SamplingParams(
            temperature=self._cfg.temperature if temperature is None else temperature,
            top_p=self._cfg.top_p,
            top_k=self._cfg.top_k,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=0,
            detokenize=False,
            stop_token_ids=self._end_of_turn_ids,
            ignore_eos=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else holds it
        )

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        request_id: str,
        max_tokens: int,
        salt: str,
        seed: int | None = None,
        temperature: float | None = None,
    ) -> Turn:
        """Sample one turn.

        Args:
            prompt_ids: [num_prompt] the whole conversation so far.
            max_tokens: most tokens of this turn.
            salt: prefix-cache name space: what was computed under one is never found under
                another.
            seed: of the request's own random numbers, below 2**63. None: those of the engine.
            temperature: None: `actor.temperature`.

        Raises: EngineError: the engine died, or took over `actor.turn_timeout_s`.
        """
        prompt = tokens_input(prompt_ids, cache_salt=salt)
        self.num_running += 1
        try:
            async with self._bounded("a turn", self._cfg.turn_timeout_s):
                await self._is_whole.wait()
                sampling = self._sampling(max_tokens, seed, temperature=temperature)
                async for output in self._llm.generate(
                    prompt, sampling, request_id, lora_request=self._adapter
                ):
                    if output.finished:
                        return self._turn(output)
        finally:
            self.num_running -= 1
        raise EngineError(f"request {request_id} ended without an output")

    async def generate_together(
        self, prompts: dict[str, list[int]], *, max_tokens: int, salt: str, seeds: dict[str, int]
    ) -> dict[str, Turn]:
        """Sample one turn for all prompts (request id -> ids) in one reproducible batch order.

        Each request draws from random numbers of its own, by `seeds`, so that what it samples does
        not depend on what this engine has sampled before.

        The scheduler of the engine stands still while the requests are handed over, so the
        batches, and with them every rounding, do not depend on timing.
        """
        async with self._bounded("a round", self._cfg.turn_timeout_s):
            await self._is_whole.wait()
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            queues = {}
            for request_id, prompt_ids in prompts.items():
                prompt = tokens_input(prompt_ids, cache_salt=salt)
                queues[request_id] = await self._llm.add_request(
                    request_id,
                    prompt,
                    self._sampling(max_tokens, seeds[request_id]),
                    lora_request=self._adapter,
                )
            await self._llm.resume_generation()
            return {
                request_id: self._turn(queue.get_nowait() or await queue.get())
                for request_id, queue in queues.items()
            }

    def _turn(self, output: Any) -> Turn:
        sample = output.outputs[0]
        token_ids = list(sample.token_ids)
        logprobs = [step[t].logprob for t, step in zip(token_ids, sample.logprobs, strict=True)]
        versions = [self.version] * len(token_ids)
        for span in sample.weight_versions or []:
            if span.version.isdigit():
                versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        self.num_sampled_tokens += len(token_ids)
        return Turn(
            token_ids,
            logprobs,
            versions,
            is_stopped=sample.finish_reason == "stop",
            num_prompt=len(output.prompt_token_ids),
            num_cached=output.num_cached_tokens or 0,
        )

    async def stage(
        self,
        offer: WeightsOffer,
        *,
        announce: Callable[[], None],
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> float:
        """Receive a version into the workers' staging buffers while generation goes on.

        Args:
            announce: called once every worker receives.
            is_given_up: whether the version is not wanted any more.

        Returns:
            The seconds in which the bytes came, of the slowest worker.

        Raises:
            WeightSyncError: the transfer failed, or what came at one worker is damaged; nothing
                has changed.
            EngineError: the engine died, or hangs.
        """
        limit_s = 2 * offer.timeout_s + LOAD_S  # a transfer has two parts with a deadline each
        started = time.monotonic()
        request = WeightTransferInitRequest(init_info={"offer": encode(offer)})
        await self._answered(offer, self._llm.init_weight_transfer_engine(request))
        announce()
        look_s = FIRST_LOOK_S
        while True:
            told = await self._answered(offer, self._llm.collective_rpc("staged"))
            workers = [Staged(**each) for each in told]
            failed = [worker for worker in workers if worker.error]
            if failed and limit_s > LAST_WORDS_S:  # the others say what came at them, too
                started, limit_s = time.monotonic(), LAST_WORDS_S
            if all(worker.is_done or worker.error for worker in workers):
                break
            if is_given_up() or time.monotonic() - started > limit_s:
                given_up = Staged(is_done=False, error="given up", is_cancelled=is_given_up())
                failed = failed or [given_up]
                break
            await asyncio.sleep(look_s)
            look_s = min(LAST_LOOK_S, 1.5 * look_s)
        if failed:
            await self._answered(offer, self._llm.collective_rpc("give_up_staging"))
            kind = TransferCancelled if failed[0].is_cancelled else WeightSyncError
            raise kind("; ".join(worker.error for worker in failed))
        return max(worker.seconds for worker in workers)

    async def _answered(self, offer: WeightsOffer, asked: Awaitable[Any]) -> Any:
        """Return what workers that receive answer, which they do between two steps."""
        self._asked_at = time.monotonic()
        try:
            async with self._bounded(
                f"receiving version {offer.version}", self._cfg.turn_timeout_s
            ):
                return await asked
        finally:
            self._asked_at = None

    async def load(self, offer: WeightsOffer) -> float:
        """Freeze generation (requests and their KV stay), load what is staged, go on.

        Returns:
            The seconds in which nothing was generated.

        Raises:
            WeightSyncError: a worker did not load all of it. Nobody knows which weights it holds,
                so generation stays frozen until a version is loaded whole.
            EngineError: the engine died, or hangs.
        """
        started = time.monotonic()
        async with self._bounded(f"loading version {offer.version}", LOAD_S):
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            if not self._is_whole.is_set():
                await self._llm.collective_rpc("forget_update")
            self._is_whole.clear()
            await self._load_staged(offer.version)
            self.version = offer.version
            if self._cfg.kv_at_update is AtUpdate.DROP:
                # Running requests lose their place; prompt and samples are computed again.
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            self._is_whole.set()
            await self._llm.resume_generation()
        pause_s = time.monotonic() - started
        self.frozen_s += pause_s
        return pause_s

    async def _load_staged(self, version: int) -> None:
        try:
            if self._takes_adapters:
                await self._llm.collective_rpc("load_staged_adapter", args=(version,))
                await self._llm.update_weight_version(str(version))
                return
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest({"version": version}))
            await self._llm.finish_weight_update(weight_version=str(version))
        except EngineDeadError:
            raise
        except Exception as error:  # what a worker raises arrives without its type
            raise WeightSyncError(f"version {version} is not loaded whole: {error}") from error

    async def score(self, sequences: list[list[int]], *, request_id: str) -> list[list[float]]:
        """Return the logprob [seq-1] of every token given those before it, nothing cached.

        Raises: EngineError: as `generate`.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scores: list[list[float]] = []
        async with self._bounded(f"scoring {request_id}", self._cfg.turn_timeout_s):
            for index, token_ids in enumerate(sequences):
                prompt = tokens_input(token_ids)
                async for output in self._llm.generate(
                    prompt, params, f"{request_id}-{index}", lora_request=self._adapter
                ):
                    if output.finished:
                        known = output.prompt_logprobs or []  # [seq]; the first token has none
                        steps = zip(token_ids[1:], (s for s in known[1:] if s), strict=True)
                        scores.append([step[token].logprob for token, step in steps])
        return scores

    def shut_down(self) -> None:
        """End the engine's processes, on its event loop; one that hangs is killed."""
        shut_down_llm(self._llm, timeout_s=SHUTDOWN_S)
