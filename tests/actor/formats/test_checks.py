"""Laws of the checks of prompts before a run starts."""

import re
from dataclasses import replace

import pytest

from actor.formats.checks import check_prompts
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.turns import FirstPrompt

SHORT = FirstPrompt(
    env="dataset",
    place="record 1 of q.jsonl",
    instruction="",
    acknowledgement="",
    messages=[{"role": "user", "content": "What is 3 + 4?"}],
)
LONG = replace(
    SHORT,
    place="record 2 of q.jsonl",
    messages=[
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "Tom has 3 pens. " * 40 + "How many?"},
    ],
)


def _config(max_model_len: int) -> RunConfig:
    return load_config("dataset", [f"actor.max_model_len={max_model_len}"])


def test_prompt_that_loses_its_question_is_refused() -> None:
    cfg = _config(128)
    with pytest.raises(ConfigError, match="1 of 2 first prompts have more than the 112") as refusal:
        check_prompts(cfg, [SHORT, LONG])
    text = str(refusal.value)
    assert "record 2 of q.jsonl" in text
    remedies = re.search(r"Use actor.max_model_len=(\d+), or .* with data.max_length=(\d+)", text)
    assert remedies is not None
    assert int(remedies[2]) > 112
    assert check_prompts(_config(int(remedies[1])), [SHORT, LONG]).startswith("2 first prompts")
    with pytest.raises(ConfigError, match="record 2 of"):
        check_prompts(_config(int(remedies[1]) - 1), [SHORT, LONG])


def test_first_page_may_be_cut_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    page = replace(LONG, place="shop-train-0", may_be_cut=True)
    assert check_prompts(_config(128), [page]) == ""
    assert re.search(
        r"first observation of shop-train-0 has \d+ tokens and is cut to 112", caplog.text
    )
