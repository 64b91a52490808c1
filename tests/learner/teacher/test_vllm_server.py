"""Law of a teacher behind vLLM's own server: the same requests, and the numbers of transformers."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from common.http.model_endpoint import Refused, Unanswered
from common.repository import ROOT
from learner.teacher.scorer import TeacherEndpoint, VocabularyCheck
from tests.learner.teacher.served import TOKENIZER
from tests.ports import free_port

MODEL = ROOT / "configs" / "policies" / "tiny-expert"
START_S = 900.0


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[TeacherEndpoint]:
    port = free_port()
    words = f"--served-model-name m --dtype float32 --max-model-len 513 --port {port}"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    argv += [*words.split(), "--host", "127.0.0.1", "--enforce-eager"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with (tmp_path / "vllm.log").open("wb") as log:
        server = subprocess.Popen(argv, env={**os.environ, **own}, stdout=log, stderr=log)
        made = TeacherEndpoint(
            find_url=lambda: f"http://127.0.0.1:{port}/v1",
            key="",
            model="m",
            timeout_s=60.0,
            is_own=True,
        )
        try:
            deadline = time.monotonic() + START_S
            while not asyncio.run(_is_up(made)):
                assert server.poll() is None, (tmp_path / "vllm.log").read_text(encoding="utf-8")
                assert time.monotonic() < deadline
                time.sleep(1.0)
            yield made
        finally:
            server.terminate()
            server.wait(60.0)


async def _is_up(endpoint: TeacherEndpoint) -> bool:
    try:
        await endpoint.tokenize("go")
    except Unanswered:
        return False
    return True


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_server_scores_tokens_as_transformers_does(endpoint: TeacherEndpoint) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    def check_of(context: int) -> VocabularyCheck:
        return VocabularyCheck(tokenizer=TOKENIZER, context=context, name="u")

    async def work() -> None:
        await check_of(512).run(endpoint)
        with pytest.raises(ConfigError, match="needs one more, 514"):
            await check_of(513).run(endpoint)
        sampled, _ = await endpoint.score(ids, positions, num_top=0)
        best, _ = await endpoint.score(ids, positions, num_top=4)
        assert sampled.logprobs is not None
        assert best.ids is not None
        assert best.top is not None
        np.testing.assert_allclose(sampled.logprobs, rows[range(3), ids[positions]], atol=1e-3)
        top, right = torch.from_numpy(rows).topk(4)
        np.testing.assert_array_equal(best.ids, right.numpy())
        np.testing.assert_allclose(best.top, top.numpy(), atol=1e-3)
        with pytest.raises(Refused, match="greater than max allowed: 20"):
            await endpoint.score(ids, positions, num_top=30)

    text = "You see a red door. open the door"
    ids = np.array(TOKENIZER.encode(text, add_special_tokens=False), dtype=np.int32)
    positions = np.arange(len(ids) - 3, len(ids))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    rows = logits.log_softmax(-1)[positions - 1].numpy()
    asyncio.run(work())
