"""Options of evaluation, and of a policy that is asked over HTTP instead of run here."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import URL, WORD, Contradiction, knob, seconds

LIMIT_KEYS = ("max_tokens", "max_completion_tokens")


class EvalItems(StrEnum):
    """Which held-out items the command `eval` plays.

    spread: the first ones of every configured subset, by the tasks' weights. tasks: the test lists
    of the catalogue's tasks, which the configured subsets must be. paper: the test sets of
    AgentGym-RL's Tables 1 to 5, at the turns of its evaluation. Of tasks and paper all items,
    unless the command line gives `eval.num_items` too.
    """

    SPREAD = "spread"
    TASKS = "tasks"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Held-out evaluation, always at the full horizon."""

    num_items: int = knob(
        400, "spread over the tasks by weight; -1: all there are", ge=-1, le=10**6
    )
    before: bool = knob(True, "evaluate the first policy")
    after: bool = knob(True, "evaluate the last policy")
    baselines: bool = knob(True, "uniform valid play and the scripted expert on the same items")
    every_steps: int = knob(0, "also while training goes on, every so many steps; 0: not", ge=0)
    stream_items: int = knob(
        128, "held-out items of each evaluation while training goes on", ge=1, le=10**6
    )
    k: int = knob(1, "command `eval`: samples of each item", ge=1, le=4096)
    items: EvalItems = knob(EvalItems.SPREAD, "command `eval`: which items")
    label: str = knob("", "command `eval`: name of the table's row; \"\": the model's")
    max_failed_frac: float = knob(0.05, "of failed episodes; more: `eval` ends with 1", ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySection:
    """A policy behind an OpenAI-compatible endpoint; only the command `eval` asks it.

    `serve` is one, and wants the key in the variable `api_key_env` itself.
    """

    url: str = knob(
        "",
        'like https://host/v1; "": the checkpoint at model.path plays, in an engine here',
        form=URL,
        also="",
    )
    model: str = knob("", "as the endpoint calls it")
    api_key_env: str = knob("", 'variable that holds the key; "": none is sent', form=WORD, also="")
    temperature: float = knob(1.0, "of sampling", ge=0, le=100)
    max_turn_tokens: int = knob(1024, "sampled tokens per turn, hidden reasoning included", ge=1)
    limit_key: str = knob("max_tokens", "what the endpoint calls that limit", one_of=LIMIT_KEYS)
    max_concurrent: int = knob(16, "requests at once", ge=1, le=10**5)
    timeout_s: float = seconds(300.0, "seconds of one request", gt=0)
    max_tries: int = knob(6, "of one turn; without any answer the episode is failed", ge=1, le=1000)
    backoff_s: float = seconds(
        1.0, "seconds before the second try; doubles", ge=0, must="be at most max_backoff_s"
    )
    max_backoff_s: float = seconds(60.0, "seconds, also of what Retry-After asks for", ge=0)

    def contradictions(self) -> Iterator[Contradiction]:
        if self.url and not self.model:
            yield "model", self.model, "policy.url needs the name of a model of that endpoint"
