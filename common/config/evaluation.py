"""Options of evaluation, of what a policy is shown, of one asked over HTTP, and of studies."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from common.config.knobs import PATH, URL, WORD, Contradiction, knob, seconds
from common.config.learning import AlgorithmSection, Correction, PolicyLoss

LIMIT_KEYS = ("max_tokens", "max_completion_tokens")
OF_ANSWERS = ("format", "plan", "reflect_every", "reflect_on_invalid")


class ContextKind(StrEnum):
    """What becomes of an episode whose next turn has no room in `actor.max_model_len`.

    full: it ends as context_full. window: a new segment begins with the first message and the
    latest turns. summary: the policy sums up; a new segment begins with the first message and that.
    fold, subagent: it ends, too, but the policy may do a part of its task in a branch, of which
    only what it returns is kept; a branch of fold is shown all that was before, one of subagent
    the first message and its call.
    """

    FULL = "full"
    WINDOW = "window"
    SUMMARY = "summary"
    FOLD = "fold"
    SUBAGENT = "subagent"


class AgentLifetime(StrEnum):
    """How long a process of `actor.agent` lives.

    episode: one is started for each episode. run: they are started with the actor, and ask for one
    episode after another, or for many at once.
    """

    EPISODE = "episode"
    RUN = "run"


class AgentFormat(StrEnum):
    """How an answer says its action. What cannot be read is an invalid action, and counts as one.

    plain: the answer is the action. react: thoughts, then `Action:` once and what follows it.
    function_call: one call of a tool, as the model's own chat template writes it.
    """

    PLAIN = "plain"
    REACT = "react"
    FUNCTION_CALL = "function_call"


class HubStyle(Protocol):
    """What it takes to know of the section `envhub`."""

    @property
    def style(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How an episode's policy answers, and what it is shown."""

    format: AgentFormat = knob(AgentFormat.PLAIN, "how an answer says its action")
    plan: bool = knob(False, "a turn before the first action in which the policy plans")
    reflect_every: int = knob(0, "actions after which the policy reflects; 0: never", ge=0, le=1000)
    reflect_on_invalid: bool = knob(False, "the policy reflects after an invalid action")
    learn_plans: bool = knob(True, "plans are trained as actions are")
    learn_reflections: bool = knob(True, "reflections are trained as actions are")

    context: ContextKind = knob(ContextKind.FULL, "when an episode outgrows max_model_len")
    context_turns: int = knob(
        4, "latest turns that a segment of context=window begins with", ge=1, le=1000
    )
    learn_summaries: bool = knob(True, "those of context=summary are trained as actions are")
    summary_request: str = knob("", 'how context=summary asks for one; "": in a sentence of ours')
    branch_turns: int = knob(
        8, "turns after which a branch of context=fold|subagent is ended", ge=1, le=1000
    )
    branch_instruction: str = knob(
        "",
        'added to the first message of context=fold|subagent; "": what opens and closes a branch',
    )

    endpoint: bool = knob(False, "episodes are played by programs that ask our endpoint: agent")
    agent: list[str] = knob([], "command of such a program")
    agent_lifetime: AgentLifetime = knob(
        AgentLifetime.EPISODE, "a process of it for each episode, or for the whole run"
    )
    num_agents: int = knob(1, "processes beside each actor with agent_lifetime=run", ge=1, le=1000)

    @property
    def reflects(self) -> bool:
        """Whether there may be reflections."""
        return self.reflect_every > 0 or self.reflect_on_invalid

    @property
    def has_segments(self) -> bool:
        """Whether episodes may be several training rows."""
        return self.endpoint or self.context is not ContextKind.FULL

    @property
    def parts_turns(self) -> bool:
        """Whether the sampled tokens of one turn may be in several training rows."""
        is_parted = self.context is ContextKind.SUMMARY and self.learn_summaries
        return self.endpoint or self.has_branches or is_parted

    @property
    def has_branches(self) -> bool:
        """Whether a policy may open branches."""
        return self.context in (ContextKind.FOLD, ContextKind.SUBAGENT)

    def of_text(self) -> "AgentOptions":
        """Return those of a policy that is asked in texts, and is always shown everything."""
        return AgentOptions(**{name: getattr(self, name) for name in OF_ANSWERS})

    def of_answers(self) -> dict[str, object]:
        """Return what of them makes an episode another one, where it is not the default."""
        told = {name: getattr(self, name) for name in OF_ANSWERS}
        return {name: value for name, value in told.items() if value not in ("plain", 0)}

    def contradictions_of_agents(self) -> Iterator[Contradiction]:
        """Yield what is asked of agents but not told, or cannot be done to them."""
        if self.endpoint != bool(self.agent):
            law = "actor.endpoint=true and the command actor.agent go together"
            yield "actor.agent", self.agent, law
        told = {
            "context": (self.context.value, "full"),
            "format": (self.format.value, "plain"),
            "plan": (self.plan, False),
            "reflect_every": (self.reflect_every, 0),
            "reflect_on_invalid": (self.reflect_on_invalid, False),
        }
        for name, (value, only) in told.items() if self.endpoint else ():
            law = f"must be {only} beside actor.endpoint=true: an agent manages its history itself"
            if value != only:
                yield f"actor.{name}", value, law

    def contradictions_of_rows(
        self, algorithm: AlgorithmSection, envhub: "HubStyle", policy: "PolicySection"
    ) -> Iterator[Contradiction]:
        """Yield what cannot be computed where the tokens of an episode are in several rows.

        And what formats of answers do not go with.
        """
        yield from self.contradictions_of_agents()
        if self.has_branches and (self.plan or self.reflects):
            law = "must be full, window or summary beside actor.plan and actor.reflect_*"
            yield "actor.context", self.context.value, law
        if self.format is AgentFormat.FUNCTION_CALL:
            law = "must be {} beside actor.format=function_call: {}"
            if envhub.style != "compact":
                why = "its instructions demand answers in ReAct's form"
                yield "envhub.style", envhub.style, law.format("compact", why)
            if policy.url:
                yield (
                    "policy.url",
                    policy.url,
                    law.format('""', "the chat template is the model's own"),
                )
        found: list[tuple[str, object]] = []
        if algorithm.policy_loss is PolicyLoss.GSPO:
            found.append(("algorithm.policy_loss", algorithm.policy_loss.value))
        if algorithm.correction in (Correction.SEQUENCE_TIS, Correction.GEOMETRIC):
            found.append(("algorithm.correction", algorithm.correction.value))
        if algorithm.negative_mask_delta > 0:
            found.append(("algorithm.negative_mask_delta", algorithm.negative_mask_delta))
        where = "endpoint=true" if self.endpoint else f"context={self.context.value}"
        for key, value in found if self.has_segments else []:
            law = "takes a ratio over a whole episode, whose segments are rows of their own here"
            yield key, value, f"{law} (actor.{where})"
        if algorithm.policy_loss is PolicyLoss.TURN and self.parts_turns:
            law = "takes a ratio over a whole turn, which may be in several rows here"
            key = "algorithm.policy_loss"
            yield key, "turn", f"{law} (actor.{where}); take ppo, or context=full or window"


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
    port: int = knob(0, "of this machine, where `serve` listens; 0: a free one", ge=0, le=65535)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySection:
    """A study of `bench --suite NAME`: whole arms of runs over seeds, worked off from a queue."""

    workers: int = knob(2, "runs at once, here or on Ray", ge=1, le=10**4)
    on_ray: bool = knob(False, "the workers are those of the Ray cluster at ray.address")
    size: float = knob(1.0, "x the steps of every run, and what counts them", gt=0, le=1000)
    num_seeds: int = knob(0, "of each arm; 0: as many as the suite has", ge=0, le=1000)
    only: list[str] = knob([], "runs (ARM-seedN) or arms; []: all that are not done yet")
    folder: str = knob("", 'below run.dir; "": study-SUITE', form=PATH, also="")
