"""Whole turns between engine and actor, instead of single tokens.

vLLM's core sends the new token of each request after each step. The actor would decode and process
each of them, which costs .03 ms of its CPU time. Here the core's scheduler collects the tokens of a
turn. It sends them when the turn ends, or when generation pauses: new weights may follow, and a
message has one version of the weights. The actor appends a message's logprobs at once.
"""

import logging
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

CUSTOM_SCHEDULER = "Using custom scheduler class"


def merged(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the consecutive outputs of one request as one output; the last gives the rest."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    last.new_logprobs = _joined([part.new_logprobs for part in parts])
    experts = [part.routed_experts for part in parts if part.routed_experts is not None]
    if experts:
        last.routed_experts = np.concatenate(experts)
    last.events = [event for part in parts for event in part.events or ()] or None
    last.prefill_stats = next((p.prefill_stats for p in parts if p.prefill_stats), None)
    for part in parts:
        if part.new_prompt_logprobs_tensors is not None:
            last.new_prompt_logprobs_tensors = part.new_prompt_logprobs_tensors
    return last


def _joined(parts: Iterable[LogprobsLists | None]) -> LogprobsLists | None:
    """Return the logprobs of consecutive parts as one object; None if no part has any."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in present]),
        np.concatenate([part.logprobs for part in present]),
        np.concatenate([part.sampled_token_ranks for part in present]),
    )


class _HoldsTurns(Scheduler):
    """A scheduler that sends the tokens of a turn together.

    Consumes: the outputs of each step. Holds: those of requests that want their final output only.
    Releases: the outputs of a request at its end, and the outputs of all requests at a pause.

    Example: a turn of 256 tokens is one message. With an update of the weights after token 100, the
    pause releases 100 tokens as the old version, and the end of the turn 156 tokens as the new one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._clients: dict[str, int] = {}  # Client of each held request.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return vLLM's outputs, without the tokens of unfinished turns."""
        sent = super().update_from_output(scheduler_output, model_runner_output)
        for client, message in sent.items():
            message.outputs = [
                output
                for core_output in message.outputs
                if (output := self._hold_or_release(core_output, client)) is not None
            ]
        if self.pause_state is not PauseState.UNPAUSED:
            for request_id, parts in self._held.items():
                client = self._clients[request_id]
                sent.setdefault(client, EngineCoreOutputs()).outputs.append(merged(parts))
            self._held.clear()
            self._clients.clear()
        return {client: message for client, message in sent.items() if _has_content(message)}

    def _hold_or_release(self, output: EngineCoreOutput, client: int) -> EngineCoreOutput | None:
        """Return what is to be sent for a new output of a request; None: it is held."""
        request_id = output.request_id
        request = self.requests.get(request_id)
        if output.finish_reason is None and _can_wait(output, request):
            self._held.setdefault(request_id, []).append(output)
            self._clients[request_id] = client
            return None
        self._clients.pop(request_id, None)
        return merged([*self._held.pop(request_id, ()), output])

    def has_requests(self) -> bool:
        # A pause is complete only after a step without requests has released the held outputs.
        return super().has_requests() or (
            bool(self._held) and self.pause_state is not PauseState.UNPAUSED
        )

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish requests, and drop the held tokens of aborted ones."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:  # The tokens of an aborted request have no receiver.
            self._held.pop(request.request_id, None)
            self._clients.pop(request.request_id, None)
        return finished

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the cache if it is not in use; a waiting request reuses no prefix of before.

        vLLM's own call does nothing while other requests run.
        """
        for request in self.requests.values():
            if request.num_computed_tokens == 0:
                request.cache_salt = f"{request.cache_salt} reset"
                request.block_hashes = []
                request.update_block_hashes()
        if self.running and not reset_running_requests:
            return False
        return super().reset_prefix_cache(reset_running_requests, reset_connector)


def _can_wait(output: EngineCoreOutput, request: Request | None) -> bool:
    """Return whether the rest of a request's turn can be awaited before an output is sent.

    Events are needed at once: the load meter counts preemptions.
    """
    params = None if request is None else request.sampling_params
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not output.events
        and output.new_sampling_mask is None
        and output.pooling_output is None
        and output.kv_transfer_params is None
    )


def _has_content(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)


class TurnScheduler(_HoldsTurns):
    """`_HoldsTurns` for an engine that awaits each step."""


class AsyncTurnScheduler(_HoldsTurns, AsyncScheduler):
    """`_HoldsTurns` for an engine that schedules a step during the one before it."""


class WholeLogprobs(LogprobsProcessor):
    """vLLM's collector of a request's logprobs, which appends those of a message at once."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        """Append the logprobs of a message to those of the request."""
        flat = self.logprobs
        if not isinstance(flat, FlatLogprobs) or self.num_logprobs or self.tokenizer is not None:
            super()._update_sample_logprobs(logprobs_lists)
            return
        # [num_tokens, 1]: with `logprobs=0`, the sampled token is the only one of its position.
        values: list[float] = logprobs_lists.logprobs[:, 0].tolist()
        first = len(flat.logprobs)
        end = first + len(values)
        flat.start_indices.extend(range(first, end))
        flat.end_indices.extend(range(first + 1, end + 1))
        flat.token_ids.extend(logprobs_lists.logprob_token_ids[:, 0].tolist())
        flat.logprobs.extend(values)
        flat.ranks.extend(logprobs_lists.sampled_token_ranks.tolist())
        flat.decoded_tokens.extend(repeat(None, end - first))
        assert self.cumulative_logprob is not None
        self.cumulative_logprob += sum(values)


def turn_params(end_of_turn_ids: list[int], temperature: float, max_tokens: int) -> SamplingParams:
    """Return vLLM's parameters for sampling a turn, to be copied for each request.

    vLLM checks all values of a new object, which takes fifty times as long as a copy.
    """
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        stop_token_ids=end_of_turn_ids,
        ignore_eos=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # No other code holds the copy.
    )


def send_whole_turns(config: VllmConfig) -> None:
    """Make an engine with this configuration send whole turns, and this process take them."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        is_async = scheduler.async_scheduling
        scheduler.scheduler_cls = AsyncTurnScheduler if is_async else TurnScheduler
    output_processor.LogprobsProcessor = WholeLogprobs  # pyright: ignore


def _is_other_record(record: logging.LogRecord) -> bool:
    """Return whether a record is not vLLM's notice about a custom scheduler."""
    return not str(record.msg).startswith(CUSTOM_SCHEDULER)


# vLLM warns about every scheduler that is not its own. The engine's process imports this module, so
# the filter applies there.
logging.getLogger("vllm.config.scheduler").addFilter(_is_other_record)
