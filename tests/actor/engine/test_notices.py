"""Laws of vLLM's repeated notices."""

import logging

import pytest

from actor.engine.load import CAST_LOGGER, count_cast_weights


def test_cast_weights_give_one_warning_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(CAST_LOGGER)
    notice = count_cast_weights()
    try:
        with caplog.at_level(logging.WARNING, logger=CAST_LOGGER):
            for number in range(311):
                logger.warning(
                    "Attempted to load weight %s with dtype %s into parameter with dtype %s",
                    f"layers.{number}",
                    "torch.float32",
                    "torch.bfloat16",
                )
            logger.warning("Another warning")
    finally:
        logger.removeFilter(notice)
    first, other = (record.getMessage() for record in caplog.records)
    assert first == (
        "Attempted to load weight layers.0 with dtype torch.float32 into parameter with dtype"
        " torch.bfloat16; the warnings about further weights are left out"
    )
    assert other == "Another warning"
    assert notice.num_seen == 311


@pytest.mark.slow
def test_notice_is_the_one_that_vllm_logs() -> None:
    """A weight in fp32 that vLLM's own loader casts to bf16 is counted."""
    import torch
    from torch import nn
    from vllm.model_executor.models.utils import AutoWeightsLoader

    notice = count_cast_weights()
    try:
        model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        AutoWeightsLoader(model).load_weights([("weight", torch.ones(2, 2))])
    finally:
        logging.getLogger(CAST_LOGGER).removeFilter(notice)
    assert notice.num_seen == 1
