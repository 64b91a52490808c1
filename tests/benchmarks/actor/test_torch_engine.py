"""Laws of the engine of plain torch: a batched row equals a row alone."""

import asyncio
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actor.rollout.episode import Turn
from actor.rollout.render import Renderer
from benchmarks.actor.torch_engine import TorchEngine
from common.repository import ROOT

POLICY = str(ROOT / "configs/policies/tiny")
TEXTS = ("goal: go to the red key\nred key 1 ahead", "goal: open the blue door\nwall 2", "ball 3")

pytestmark = pytest.mark.slow  # transformers takes seconds to import


def make_engine() -> tuple[TorchEngine, Renderer]:
    renderer = Renderer(AutoTokenizer.from_pretrained(POLICY, local_files_only=True))
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    ends = renderer.end_of_turn_ids
    return TorchEngine(model, ends, temperature=1.0), renderer


def play(
    engine: TorchEngine, renderer: Renderer, texts: Mapping[str, str]
) -> dict[str, list[Turn]]:
    """Play three turns of each; "a" ends after its second."""
    ids = {name: renderer.first_prompt(text) for name, text in texts.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in texts}
    for number in range(3):
        running = {name: each for name, each in ids.items() if number < 2 or name != "a"}
        if not running:
            continue
        prompts = {f"{number}:{name}": list(each) for name, each in running.items()}
        seeds = {f"{number}:{name}": 7 * number + ord(name) for name in running}
        answer = engine.generate_together(prompts, max_tokens=12, salt="", seeds=seeds)
        for request, turn in asyncio.run(answer).items():
            name = request.partition(":")[2]
            turns[name].append(turn)
            text = f"you see {number} walls"
            told = renderer.after_action(text, is_stopped=turn.is_stopped)
            ids[name] += [*turn.token_ids, *told]
    return turns


def test_batched_row_equals_a_row_alone_over_turns() -> None:
    engine, renderer = make_engine()
    texts = dict(zip("abc", TEXTS, strict=True))
    together = play(engine, renderer, texts)
    for name, text in texts.items():
        alone = play(engine, renderer, {name: text})[name]
        assert [turn.token_ids for turn in alone] == [turn.token_ids for turn in together[name]]
        for one, other in zip(alone, together[name], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_logprobs_and_versions_match_loaded_weights() -> None:
    engine, renderer = make_engine()
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    engine.load(model.state_dict(), version=5)
    prompt = renderer.first_prompt(TEXTS[0])
    answer = engine.generate_together({"0:a": prompt}, max_tokens=12, salt="", seeds={"0:a": 1})
    turn = asyncio.run(answer)["0:a"]
    ids = torch.tensor([prompt + turn.token_ids])
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    known = scores.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0].tolist()
    assert turn.logprobs == pytest.approx(known, abs=1e-4)
    assert turn.versions == [5] * len(turn.token_ids)
    assert turn.is_stopped == (turn.token_ids[-1] in renderer.end_of_turn_ids)


def test_row_with_a_new_segment_equals_a_row_alone() -> None:
    engine, renderer = make_engine()
    first, other = (renderer.first_prompt(text) for text in TEXTS[:2])

    def turn(engine: TorchEngine, number: int, **prompts: list[int]) -> dict[str, Turn]:
        asked = {f"{number}:{name}": ids for name, ids in prompts.items()}
        seeds = {request: number for request in asked}
        answer = engine.generate_together(asked, max_tokens=12, salt="", seeds=seeds)
        return {request.partition(":")[2]: each for request, each in asyncio.run(answer).items()}

    said = turn(engine, 0, a=first, b=first)["b"]
    told = renderer.after_action("wall 3", is_stopped=said.is_stopped)
    got = turn(engine, 1, a=[*other, *told], b=[*first, *said.token_ids, *told])
    for name, ids in {"a": [*other, *told], "b": [*first, *said.token_ids, *told]}.items():
        alone = turn(make_engine()[0], 1, **{name: ids})[name]
        assert alone.token_ids == got[name].token_ids
        assert alone.logprobs == pytest.approx(got[name].logprobs, abs=1e-4)
