"""Plans, reflections and formats in real runs: what the environment did not see is trained on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.segments import Aside, asides_of
from common.wire.messages import EpisodeKind
from learner.journal.journal import read_journal
from tests.actor.formats.templates import CALL
from tests.end_to_end.runs import REPOSITORY, Run, balances
from tests.in_process import carry_out

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TINY = REPOSITORY / "configs/policies/tiny"
WITH_TOOLS = (  # the tiny policy's turns, and what it has no words for
    "{%- for t in tools or [] -%}<|user|>{{ t | tojson }}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|assistant|>{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}CALL{%- endfor -%}<|end|>{%- else -%}<|user|>"
    "{%- if m.role == 'tool' -%}answer: {% endif -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def said(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_run_trains_plans_and_masks_reflections(tmp_path: Path) -> None:
    thinking = ("actor.plan=true", "actor.reflect_every=2", "actor.learn_reflections=false")
    room = ("actor.max_model_len=1024", "eval.before=false", "eval.after=false")
    with Run(tmp_path, *thinking, *room) as run:
        assert run.wait(timeout_s=600) == 0, run.output
        assert run.left_over() == []
    assert balances(run.read("ledger.json"))
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    played = [t for _, t in read_journal(run.root / "journal") if t.kind is EpisodeKind.TRAIN]
    assert len(played) >= 3 * 2 * 2
    for each in played:
        plans, thoughts = (
            [part for *part, kind in asides_of(each) if kind == wanted]
            for wanted in (Aside.PLAN, Aside.REFLECTION)
        )
        assert len(plans) == 1
        assert len(thoughts) == (each.num_turns - 1) // 2  # before each turn that follows two
        assert all(each.loss_mask[a:b].all() for a, b in plans)
        assert not any(each.loss_mask[a:b].any() for a, b in thoughts)
    shown = said("show", "r", f"run.dir={tmp_path}", "num=40")
    assert "--- plan 1 (version" in shown
    assert "--- reflection 3\n" in shown


@pytest.mark.long
def test_answers_without_a_call_are_invalid_actions(tmp_path: Path) -> None:
    """The tiny policy has never seen a call: each of its turns is invalid, and no failure."""
    policy = tmp_path / "policy"
    shutil.copytree(TINY, policy)
    (policy / "chat_template.jinja").write_text(WITH_TOOLS.replace("CALL", CALL), encoding="utf-8")
    words = ["eval", "--config", "smoke", f"run.dir={tmp_path}", "run.name=e", "eval.num_items=4"]
    said(*words, f"model.path={policy}", "actor.format=function_call", "actor.max_model_len=2048")
    played = [t for _, t in read_journal(tmp_path / "e/eval/journal")]
    assert len(played) == 4
    for each in played:
        assert not each.end_reason.is_infrastructure_failure
        assert each.num_turns > 1
        assert each.num_invalid_actions == each.num_turns


def test_template_without_tools_is_refused_before_playing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["eval"], []):
        words = [*command, "--config", "smoke", f"run.dir={tmp_path}", "run.name=e"]
        done = carry_out([*words, "actor.format=function_call"], capsys)
        assert done.returncode != 0
        assert "function_call: the chat template of model.path has no tools" in done.stderr
        assert not (tmp_path / "e" / "journal").exists()
