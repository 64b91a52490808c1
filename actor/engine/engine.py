"""The generation engine: vLLM's AsyncLLM on token ids, with weight updates during generation."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
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
from actor.engine.routing import is_recorded_by_vllm, narrowed
from actor.engine.start import is_eager, shut_down_llm, start_llm
from actor.engine.startup_history import StartupHistory
from actor.engine.whole_turns import turn_params
from actor.rollout.episode import OnTokens, Turn
from actor.weights.stage import Staged, failure_of
from common.config.actor import ActorSection, AtUpdate
from common.config.learner import FULL, LoraSection
from common.config.model import ModelSection
from common.errors import EngineError, WeightSyncError
from common.weights.messages import WeightsOffer
from common.wire.codec import encode

logger = logging.getLogger(__name__)

# Seconds until the engine's processes are killed. They hold no state worth saving.
SHUTDOWN_S = 1.0
LOAD_S = 60.0  # Seconds for the engine to pause and to load the received weights.
REPORT_S = 1.0  # Seconds for the other workers to report, once one has failed.
# First and last interval in seconds between two polls of the staging.
FIRST_POLL_S = 0.005
LAST_POLL_S = 0.1
DEATH_POLL_S = 0.5  # Seconds between two checks of an engine that only serves.


def digest_of(token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
    """Return a checksum of sampled tokens and their logprobs, to compare logs with the journal."""
    scores = np.asarray(logprobs, np.float32).tobytes()
    return crc32(scores, crc32(np.asarray(token_ids, np.int32).tobytes()))


def _log_sampled(request_id: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Log the tokens of an answer by their number and checksum."""
    if logger.isEnabledFor(logging.DEBUG):
        digest = digest_of(token_ids, logprobs)
        logger.debug("sampled request=%s num=%d crc=%08x", request_id, len(token_ids), digest)


class Engine:
    """One vLLM engine and the version of its weights.

    Example:
        engine = await Engine.start(model_cfg, actor_cfg, end_of_turn_ids=[3], seed=0)
        turn = await engine.generate([1], request_id="a", max_tokens=16, salt=lambda: "v3")
        stage_s = await engine.stage(offer)     receives the weights during generation
        pause_s = await engine.load(offer)      pauses generation, loads, resumes

    After an incomplete update the engine samples nothing until a later one is complete.
    """

    def __init__(
        self, llm: AsyncLLM, cfg: ActorSection, *, end_of_turn_ids: list[int], watch: ProcessWatch
    ) -> None:
        self._llm = llm
        self._watch = watch
        self.meter: EngineLoad | None = None
        self._cfg = cfg
        self._known_params = lru_cache(partial(turn_params, end_of_turn_ids))
        self._takes_adapters = False
        self._asks_for_experts = False  # True: the worker records the experts, not vLLM itself.
        self._named = REQUEST
        self.version = -1  # No version was received yet.
        self.num_sampled_tokens = 0
        self.frozen_s = 0.0  # Seconds of all pauses for loading weights.
        self.num_running = 0
        self._is_whole = asyncio.Event()  # Set while all weights are of one version.
        self._is_whole.set()
        self._is_awake = asyncio.Event()  # Cleared while the engine's memory is given back.
        self._is_awake.set()
        self._asked_at: float | None = None  # Time of the pending call to the staging workers.

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
        records_experts: bool = False,
    ) -> "Engine":
        """Start the engine processes and warm them up.

        If `has_weights` is false, the weights are random at first. If `lora` has a rank above 0,
        the engine takes adapters and keeps its base weights. Requests with their own seeds need
        `is_repeatable`. With `records_experts`, turns have the experts that the engine chose.

        Raises: EngineError: the engine did not start, or cannot sample.
        """
        started = time.monotonic()
        usual = StartupHistory()
        kind = "eager" if is_eager(cfg.enforce_eager) else "compiled"
        what = f"engine {model.path} {model.dtype} {kind}"
        usual_s = f" usual_s={s:.0f}" if (s := usual.seconds(what)) else ""
        logger.info("starting engine kind=%s%s", kind, usual_s)
        meter = EngineLoad() if meters_load else None
        llm, watch = start_llm(
            model,
            cfg,
            seed=seed,
            meter=meter,
            has_weights=has_weights,
            lora=lora,
            is_repeatable=is_repeatable,
            records_experts=records_experts,
        )
        engine = cls(llm, cfg, end_of_turn_ids=end_of_turn_ids, watch=watch)
        engine.meter = meter
        engine._takes_adapters = lora.rank > 0
        engine._asks_for_experts = records_experts and not is_recorded_by_vllm()
        problem = await engine._warm_up(timeout_s=cfg.start_timeout_s)
        if problem:
            engine.shut_down()
            raise EngineError(f"engine did not start: {problem}")
        (tiles, *_) = await llm.collective_rpc("tiles")
        compile_s = max(await llm.collective_rpc("compile_s"))
        num_cast = max(await llm.collective_rpc("num_cast_weights"))
        took_s = time.monotonic() - started
        usual.note(what, took_s)
        logger.info(
            "engine ready took_s=%.1f compile_s=%.1f cast_weights=%d amx_tiles=%s",
            took_s,
            compile_s,
            num_cast,
            tiles,
        )
        return engine

    async def _warm_up(self, *, timeout_s: float) -> str:
        """Sample two tokens, which triggers lazy initialisation; return the error, or ""."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.generate(
                    [0, 0], request_id="warm-up", max_tokens=2, salt=lambda: "start"
                )
        except TimeoutError:
            return f"no first token within {timeout_s:g} s"
        except EngineError as error:
            return str(error)
        return ""

    async def device_ids(self) -> list[str]:
        """Return the names of the engine's GPUs, one per worker; "" for a CPU."""
        async with self._bounded("the query of its devices", self._cfg.turn_timeout_s):
            return cast(list[str], await self._llm.collective_rpc("device_id"))

    @asynccontextmanager
    async def _bounded(self, doing: str, timeout_s: float) -> AsyncIterator[None]:
        """Limit a call of the engine to `timeout_s`, and describe a timeout or a dead engine."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise EngineError(f"engine hangs: {doing} took more than {timeout_s:g} s") from None
        except EngineDeadError:
            raise EngineError(f"engine died: {await self._watch.describe_death()}") from None

    @property
    def is_whole(self) -> bool:
        """Whether all weights are of one version. If not, the engine samples nothing."""
        return self._is_whole.is_set()

    @property
    def can_sample(self) -> bool:
        """Whether requests are sampled now: all weights are of one version, and in memory."""
        return self.is_whole and not self.is_asleep

    @property
    def is_asleep(self) -> bool:
        """Whether the engine's memory is given back. Sampling waits for the next version."""
        return not self._is_awake.is_set()

    @property
    def quiet_s(self) -> float:
        """Seconds for which the workers have not answered a call during staging."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the engine accepts."""
        return self._llm.model_config.get_vocab_size()

    @property
    def adapter(self) -> LoRARequest | None:
        """The adapter of every request; None before the first version."""
        return self._named if self._takes_adapters and self.version >= 0 else None

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine, for a server that samples by itself."""
        return self._llm

    @property
    def options(self) -> ActorSection:
        """The settings with which the engine started."""
        return self._cfg

    async def wait_for_death(self) -> None:
        """Wait until the engine can sample no more. Raises: EngineError: it died."""
        while not self._llm.errored:
            await asyncio.sleep(DEATH_POLL_S)
        raise EngineError(f"engine died: {await self._watch.describe_death()}")

    def take_adapter_at(self, folder: Path) -> None:
        """Sample with the adapter in a folder, written by peft, instead of a published one."""
        self._named = adapter_at(folder)

    def _sampling_params(
        self, max_tokens: int, seed: int | None = None, *, temperature: float | None = None
    ) -> SamplingParams:
        """Return vLLM's parameters for sampling a turn."""
        chosen = self._cfg.temperature if temperature is None else temperature
        params = copy(self._known_params(chosen, max_tokens))
        params.seed = seed
        return params

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        request_id: str,
        max_tokens: int,
        salt: Callable[[], str],
        seed: int | None = None,
        temperature: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Sample one turn. A cancelled call aborts the request.

        Args:
            prompt_ids: [num_prompt] the whole conversation so far.
            max_tokens: maximum number of tokens of this turn.
            salt: returns the prefix-cache salt: a prefix is reused only under the salt that it was
                computed under. It is called once the engine has whole weights, since a version may
                be loaded before.
            seed: seed of the request's own random generator, below 2**63. None: the engine's
                generator.
            temperature: None: `actor.temperature`.
            on_tokens: receives the tokens of the turn as they are sampled, without the last ones.
                Its errors abort the request. None: the engine sends the whole turn at once.

        Raises: EngineError: the engine died, or exceeded `actor.turn_timeout_s`.
        """
        await self._is_awake.wait()
        self.num_running += 1
        try:
            async with self._bounded("a turn", self._cfg.turn_timeout_s):
                await self._is_whole.wait()
                prompt = tokens_input(prompt_ids, cache_salt=salt())
                sampling = self._sampling_params(max_tokens, seed, temperature=temperature)
                if on_tokens is not None:
                    sampling.output_kind = RequestOutputKind.DELTA
                # All outputs are taken: a generator that is left before its end aborts the request.
                answers = self._llm.generate(
                    prompt, sampling, request_id, lora_request=self.adapter
                )
                if on_tokens is not None:
                    async with aclosing(answers):
                        turn = await self._streamed(answers, on_tokens, request_id=request_id)
                    experts = await self._experts_of(request_id)
                    return turn if experts is None else replace(turn, experts=narrowed(experts))
                for output in [each async for each in answers if each.finished]:
                    return self._turn(output, await self._experts_of(request_id))
        finally:
            self.num_running -= 1
        raise EngineError(f"request {request_id} ended without an output")

    async def _streamed(
        self, answers: AsyncIterator[Any], on_tokens: OnTokens, *, request_id: str
    ) -> Turn:
        """Return a turn whose tokens arrive in parts.

        Each part has the engine's version: older tokens have arrived before the engine loads a
        newer one.
        """
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        last: Any = None
        try:
            async for output in answers:
                last = output
                sample = output.outputs[0]
                new = list(sample.token_ids)
                if not new:
                    continue
                part = Turn(new, list(sample.logprobs.logprobs), [self.version] * len(new))
                assert len(part.logprobs) == len(new), "vLLM reports a logprob for each token"
                self.num_sampled_tokens += len(new)
                token_ids += part.token_ids
                logprobs += part.logprobs
                versions += part.versions
                if not output.finished:
                    on_tokens(part)
        finally:  # An aborted request has sampled tokens, too.
            _log_sampled(request_id, token_ids, logprobs)
        if last is None or not last.finished:
            raise EngineError("a streamed request ended without its last output")
        return self._whole(last, token_ids, logprobs, versions)

    async def generate_together(
        self,
        prompts: dict[str, list[int]],
        *,
        max_tokens: int,
        salt: Callable[[], str],
        seeds: dict[str, int],
    ) -> dict[str, Turn]:
        """Sample one turn for all prompts (request id -> ids) in one reproducible batch order.

        Each request has its own random generator, seeded from `seeds`. So its samples do not depend
        on earlier requests of this engine.

        The engine's scheduler is paused while the requests are added. So the batches, and with them
        all rounding, do not depend on timing.
        """
        await self._is_awake.wait()
        async with self._bounded("a round of turns", self._cfg.turn_timeout_s):
            await self._is_whole.wait()
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            queues = {}
            for request_id, prompt_ids in prompts.items():
                prompt = tokens_input(prompt_ids, cache_salt=salt())
                queues[request_id] = await self._llm.add_request(
                    request_id,
                    prompt,
                    self._sampling_params(max_tokens, seeds[request_id]),
                    lora_request=self.adapter,
                )
            await self._llm.resume_generation()
            outputs = {
                request_id: queue.get_nowait() or await queue.get()
                for request_id, queue in queues.items()
            }
            return {
                request_id: self._turn(output, await self._experts_of(request_id))
                for request_id, output in outputs.items()
            }

    async def _experts_of(self, request_id: str) -> np.ndarray | None:
        """Return the experts that the worker recorded for a finished request; None: vLLM does."""
        if not self._asks_for_experts:
            return None
        replies = await self._llm.collective_rpc("take_experts", args=(request_id,))
        content, shape, dtype = replies[0]
        return np.frombuffer(content, dtype=dtype).reshape(shape)

    def _turn(self, output: Any, experts: np.ndarray | None = None) -> Turn:
        """Return vLLM's output as a turn: each token with its logprob and its version."""
        sample = output.outputs[0]
        token_ids = list(sample.token_ids)
        logprobs = sample.logprobs.logprobs  # One for each token, because of `logprobs=0`.
        assert len(logprobs) == len(token_ids), "vLLM reports a logprob for each token"
        self.num_sampled_tokens += len(token_ids)
        _log_sampled(output.request_id, token_ids, logprobs)
        versions = [self.version] * len(token_ids)
        turn = self._whole(output, token_ids, logprobs, versions)
        return turn if experts is None else replace(turn, experts=narrowed(experts))

    def _whole(
        self, last: Any, token_ids: list[int], logprobs: list[float], versions: list[int]
    ) -> Turn:
        """Return a complete turn with the versions and the experts of vLLM's last output."""
        sample = last.outputs[0]
        for span in sample.weight_versions or []:
            if span.version.isdigit():
                versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        return Turn(
            token_ids,
            logprobs,
            versions,
            is_stopped=sample.finish_reason == "stop",
            num_prompt=len(last.prompt_token_ids),
            num_cached=last.num_cached_tokens or 0,
            experts=narrowed(sample.routed_experts),
        )

    async def stage(
        self,
        offer: WeightsOffer,
        *,
        announce: Callable[[], None],
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> float:
        """Receive a version into the workers' staging buffers during generation.

        Args:
            announce: called once every worker receives.
            is_given_up: returns whether the version is no longer wanted.

        Returns:
            The seconds of the transfer at the slowest worker.

        Raises:
            WeightSyncError: the transfer failed, or a worker received damaged data; the weights are
                unchanged.
            EngineError: the engine died, or hangs.
        """
        if self.is_asleep:  # The version is received into memory that the engine has again.
            async with self._bounded("waking up", LOAD_S):
                await self._llm.wake_up(["weights"])
        # A transfer has two parts, each with its own deadline.
        limit_s = 2 * offer.timeout_s + LOAD_S
        started = time.monotonic()
        request = WeightTransferInitRequest(init_info={"offer": encode(offer)})
        await self._answered(offer, self._llm.init_weight_transfer_engine(request))
        announce()
        poll_s = FIRST_POLL_S
        while True:
            replies = await self._answered(offer, self._llm.collective_rpc("staged"))
            workers = [Staged(**each) for each in replies]
            failed = [worker for worker in workers if worker.error]
            if failed and limit_s > REPORT_S:  # The other workers report their result, too.
                started = time.monotonic()
                limit_s = REPORT_S
            if all(worker.is_done or worker.error for worker in workers):
                break
            if is_given_up() or time.monotonic() - started > limit_s:
                is_cancelled = is_given_up()
                why = "the transfer was cancelled" if is_cancelled else "the transfer timed out"
                given_up = Staged(is_done=False, error=why, is_cancelled=is_cancelled)
                failed = failed or [given_up]
                break
            await asyncio.sleep(poll_s)
            poll_s = min(LAST_POLL_S, 1.5 * poll_s)
        if failed:
            await self._answered(offer, self._llm.collective_rpc("give_up_staging"))
            raise failure_of(failed)
        return max(worker.seconds for worker in workers)

    async def _answered(self, offer: WeightsOffer, asked: Awaitable[Any]) -> Any:
        """Await a call to staging workers, which answer between two steps."""
        self._asked_at = time.monotonic()
        try:
            async with self._bounded(
                f"receiving version {offer.version}", self._cfg.turn_timeout_s
            ):
                return await asked
        finally:
            self._asked_at = None

    async def load(self, offer: WeightsOffer) -> float:
        """Pause generation, load the staged version, resume. Requests and their KV cache are kept.

        Returns:
            The seconds of the pause.

        Raises:
            WeightSyncError: a worker did not load the whole version. Its weights are undefined, so
                generation stays paused until a version is loaded completely.
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
            if self.is_asleep:
                await self._llm.wake_up(["kv_cache"])
                self._is_awake.set()
                logger.info("engine is awake version=%d", offer.version)
            if self._cfg.kv_at_update is AtUpdate.DROP:
                # Running requests are preempted. Their prompts and samples are computed again.
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            elif self._cfg.prefixes_at_update is AtUpdate.DROP:
                await self._llm.reset_prefix_cache()  # Waiting requests have the older salt.
            self._is_whole.set()
            await self._llm.resume_generation()
        pause_s = time.monotonic() - started
        self.frozen_s += pause_s
        return pause_s

    async def sleep(self) -> None:
        """Give the GPU's memory back until the next version is loaded, as `actor.sleep` defines.

        Raises: EngineError: the engine died, or hangs.
        """
        if self.is_asleep:
            return
        started = time.monotonic()
        self._is_awake.clear()
        async with self._bounded("giving its memory back", LOAD_S):
            await self._llm.sleep(level=self._cfg.sleep, mode="keep")
            await self._llm.collective_rpc("free_staging")
        took_s = time.monotonic() - started
        logger.info("engine sleeps level=%d took_s=%.2f", self._cfg.sleep, took_s)

    async def _load_staged(self, version: int) -> None:
        """Load the staged version by vLLM's calls for weight updates."""
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
        except Exception as error:  # An error of a worker arrives without its type.
            raise WeightSyncError(
                f"version {version} was not loaded completely: {error}"
            ) from error

    async def score(self, sequences: list[list[int]], *, request_id: str) -> list[list[float]]:
        """Return the logprob [seq-1] of each token given its predecessors, without prefix caching.

        Raises: EngineError: as `generate`.
        """
        scores: list[list[float]] = []
        async with self._bounded(f"scoring {request_id}", self._cfg.turn_timeout_s):
            for index, token_ids in enumerate(sequences):
                number = f"{request_id}-{index}"
                logprobs = await self.prompt_logprobs(token_ids, num_top=0, request_id=number)
                steps = zip(token_ids[1:], (step for step in logprobs[1:] if step), strict=True)
                scores.append([step[token][0] for token, step in steps])
        return scores

    async def prompt_logprobs(
        self, token_ids: list[int], *, num_top: int, request_id: str
    ) -> list[dict[int, tuple[float, int]] | None]:
        """Return (logprob at temperature 1, rank from 1) by token at each position of a prompt.

        Each position has the prompt's own token and the `num_top` most probable tokens given the
        tokens before it. The first position has None.

        Raises: EngineError: as `generate`.
        """
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=num_top,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with self._bounded(f"scoring {request_id}", self._cfg.turn_timeout_s):
            async for output in self._llm.generate(
                tokens_input(token_ids), params, request_id, lora_request=self.adapter
            ):
                if output.finished:
                    steps = cast(list[Any], output.prompt_logprobs or [])
                    return [
                        step and {token: (each.logprob, each.rank) for token, each in step.items()}
                        for step in steps
                    ]
        raise EngineError(f"request {request_id} ended without an output")

    def shut_down(self) -> None:
        """Stop the engine's processes, on its event loop. A hanging process is killed."""
        shut_down_llm(self._llm, timeout_s=SHUTDOWN_S)
