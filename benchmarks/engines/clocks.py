"""Clocks in place of engine processes: they speak vLLM's protocol by sockets and compute nothing.

`python -m benchmarks.engines.clocks FOLDER TOKENS_PER_S NAME...` serves one engine for each name. A
request's turn has a random number of tokens and takes the time of that many steps.
"""

import heapq
import mmap
import random
import struct
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from benchmarks.engines.suite import COUNTER

MIN_TOKENS = 60  # Tokens of a turn, 100 on average.
MAX_TOKENS = 140
FIRST_WORD = 10  # Smaller token ids are control tokens.
END_OF_TURN = 3
ENGINE_IDENTITY = (0).to_bytes(2, "little")  # The name of vLLM's first engine.
POLL_S = 0.05


def addresses_of(folder: Path, name: str) -> dict[str, str]:
    """Return the addresses of an engine, as vLLM's client takes those of a managed one."""
    where = f"ipc://{folder}/{name}"
    return {"input_address": f"{where}-in", "output_address": f"{where}-out"}


class EngineClock:
    """The sockets of one simulated engine, with vLLM's encoding."""

    def __init__(self, context: Any, addresses: dict[str, str], *, vocab_size: int) -> None:
        self.requests = context.socket(zmq.DEALER)
        self.requests.setsockopt(zmq.IDENTITY, ENGINE_IDENTITY)
        self.requests.connect(addresses["input_address"])
        self.requests.send(b"")  # It is ready.
        self._answers = context.socket(zmq.PUSH)
        self._answers.connect(addresses["output_address"])
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)
        self._decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._words = list(range(FIRST_WORD, vocab_size))

    def receive(self) -> list[EngineCoreRequest]:
        """Return the new requests, and answer questions about the engine."""
        added: list[EngineCoreRequest] = []
        while self.requests.poll(0):
            kind, *frames = self.requests.recv_multipart()
            if kind == EngineCoreRequestType.ADD.value:
                added.append(self._add_decoder.decode(frames))
            elif kind == EngineCoreRequestType.UTILITY.value:
                _, call_id, method, _ = self._decoder.decode(frames)
                assert method == "get_supported_tasks", method
                answer = UtilityOutput(call_id=call_id, result=UtilityResult(["generate"]))
                self._send(EngineCoreOutputs(utility_output=answer))
        return added

    def end(self, turns: list[tuple[EngineCoreRequest, int]]) -> None:
        """Send the outputs of requests that end in the same step, each with its tokens."""
        self._send(EngineCoreOutputs(outputs=[self._output(*turn) for turn in turns]))

    def _output(self, request: EngineCoreRequest, num_tokens: int) -> EngineCoreOutput:
        """Return a turn of random words as the engine's scheduler sends it."""
        token_ids = [*random.choices(self._words, k=num_tokens - 1), END_OF_TURN]
        num_prompt = len(request.prompt_token_ids or ())
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=token_ids,
            new_logprobs=LogprobsLists(
                np.array(token_ids, dtype=np.int32)[:, None],
                np.full((num_tokens, 1), -1.0, dtype=np.float32),
                np.ones(num_tokens, dtype=np.int32),
            ),
            finish_reason=FinishReason.STOP,
            stop_reason=END_OF_TURN,
            prefill_stats=PrefillStats(num_prompt_tokens=num_prompt),
        )

    def _send(self, outputs: EngineCoreOutputs) -> None:
        self._answers.send_multipart(self._encoder.encode(outputs))


def serve(folder: Path, names: list[str], *, token_s: float, vocab_size: int) -> None:
    """Serve all engines until the process is ended.

    Args:
        token_s: seconds of a request for each of its tokens.
    """
    context = zmq.Context()
    engines = [
        EngineClock(context, addresses_of(folder, name), vocab_size=vocab_size) for name in names
    ]
    poller = zmq.Poller()
    by_socket = {engine.requests: engine for engine in engines}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    with (folder / COUNTER).open("r+b") as file, mmap.mmap(file.fileno(), 8) as counter:
        running: list[tuple[float, int, EngineClock, EngineCoreRequest, int]] = []
        number = num_tokens = 0
        while True:
            wait_s = min(POLL_S, running[0][0] - time.monotonic() if running else POLL_S)
            for socket, _ in poller.poll(max(0, round(1e3 * wait_s))):
                engine = by_socket[socket]
                for request in engine.receive():
                    length = random.randint(MIN_TOKENS, MAX_TOKENS)
                    number += 1
                    ends_at = time.monotonic() + length * token_s
                    heapq.heappush(running, (ends_at, number, engine, request, length))
            now = time.monotonic()
            ended = defaultdict[EngineClock, list[tuple[EngineCoreRequest, int]]](list)
            while running and running[0][0] <= now:
                _, _, engine, request, length = heapq.heappop(running)
                ended[engine].append((request, length))
                num_tokens += length
            for engine, turns in ended.items():
                engine.end(turns)
            if ended:
                struct.pack_into("q", counter, 0, num_tokens)


if __name__ == "__main__":
    place, rate, vocabulary, *all_names = sys.argv[1:]
    serve(Path(place), all_names, token_s=float(rate), vocab_size=int(vocabulary))
