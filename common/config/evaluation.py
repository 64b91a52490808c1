"""Options of evaluation, of the policy's context, of endpoint policies, and of studies."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from common.config.knobs import HOST, PATH, URL, WORD, Contradiction, knob, seconds
from common.config.learning import AlgorithmSection, Correction, PolicyLoss
from common.config.seats.options import SeatsOptions

LIMIT_KEYS = ("max_tokens", "max_completion_tokens")
OF_ANSWERS = ("format", "plan", "reflect_every", "reflect_on_invalid")
PORT = "{port}"  # Stands for the port in `actor.agents.advertise`.


class ContextKind(StrEnum):
    """Handling of an episode whose next turn does not fit in `actor.max_model_len`.

    full: the episode ends as context_full. window: a new segment begins with the first message and
    the latest turns. summary: the policy writes a summary; a new segment begins with the first
    message and the summary. fold, subagent: the episode ends, but the policy can do parts of its
    task in branches. Only the result of a branch stays in the context. A branch of fold receives
    all earlier messages; a branch of subagent receives the first message and its call.
    """

    FULL = "full"
    WINDOW = "window"
    SUMMARY = "summary"
    FOLD = "fold"
    SUBAGENT = "subagent"


class KeepThinking(StrEnum):
    """Thoughts of earlier answers in later prompts.

    all: the prompt keeps each answer as it was sampled. last: only the latest answer keeps its
    thoughts. none: no earlier answer does. Where thoughts are dropped, the episode continues as a
    new segment, with each past answer in the form of the chat template.
    """

    ALL = "all"
    LAST = "last"
    NONE = "none"


class AgentLifetime(StrEnum):
    """Lifetime of a process of `actor.agent`.

    episode: each episode has its own process. run: the processes start with the actor and request
    episodes one after another, or several at once.
    """

    EPISODE = "episode"
    RUN = "run"


class AgentFormat(StrEnum):
    """Format of the action in an answer.

    plain: the answer is the action. react: thoughts, then `Action:` once and the action.
    function_call: one tool call in the format of the model's own chat template.
    """

    PLAIN = "plain"
    REACT = "react"
    FUNCTION_CALL = "function_call"


class HubStyle(Protocol):
    """The required part of the section `envhub`."""

    @property
    def style(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentServerOptions:
    """The address of an actor's endpoint for agents. See docs/BRING_YOUR_OWN_AGENT.md."""

    host: str = knob(
        "127.0.0.1",
        "Sets the address at which an actor listens for its agents. 0.0.0.0 lets other machines and"
        " containers connect.",
        form=HOST,
    )
    port: int = knob(
        0,
        "Sets the first port for agents; each actor of a machine takes the next free one. 0 chooses"
        " any free port.",
        ge=0,
        le=65535,
    )
    advertise: str = knob(
        "",
        "Sets the URL that agents receive, such as http://host.docker.internal:{port}, where {port}"
        " is the actor's port. Empty derives it from the address.",
    )
    tls_certificate: str = knob(
        "",
        "Names a PEM file with the certificate of the endpoint, for https. Empty uses http.",
        form=PATH,
        also="",
    )
    tls_key: str = knob(
        "", "Names a PEM file with the certificate's private key.", form=PATH, also=""
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if bool(self.tls_certificate) != bool(self.tls_key):
            law = "actor.agents.tls_certificate and actor.agents.tls_key need each other"
            yield "tls_certificate", self.tls_certificate, law
        if self.advertise and not URL.fits(self.advertise.replace(PORT, "1")):
            yield "advertise", self.advertise, f"must be {URL.phrase}, or empty"
        if self.tls_certificate and self.advertise.startswith("http://"):
            law = "must begin with https:// with actor.agents.tls_certificate"
            yield "advertise", self.advertise, law


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Format of the policy's answers, and the context that it receives."""

    format: AgentFormat = knob(
        AgentFormat.PLAIN,
        "Selects how an answer contains its action. An unreadable answer counts as an invalid "
        "action.",
    )
    plan: bool = knob(
        False, "Adds a turn before the first action in which the policy writes a plan."
    )
    reflect_every: int = knob(
        0, "Adds a turn of reflection after this many actions. 0 adds none.", ge=0, le=1000
    )
    reflect_on_invalid: bool = knob(False, "Adds a turn of reflection after each invalid action.")
    learn_plans: bool = knob(True, "Trains on the tokens of plans as on those of actions.")
    learn_reflections: bool = knob(
        True, "Trains on the tokens of reflections as on those of actions."
    )

    context: ContextKind = knob(
        ContextKind.FULL,
        "Selects what happens to an episode whose next turn does not fit in actor.max_model_len.",
    )
    context_turns: int = knob(
        4,
        "With context=window, keeps this many of the latest turns in a new segment.",
        ge=1,
        le=1000,
    )
    keep_thinking: KeepThinking = knob(
        KeepThinking.ALL, "Selects which earlier answers keep their thoughts in later prompts."
    )
    learn_summaries: bool = knob(
        True, "With context=summary, trains on the tokens of summaries as on those of actions."
    )
    summary_request: str = knob(
        "",
        "With context=summary, sets the text that requests a summary. Empty uses a built-in "
        "sentence.",
    )
    branch_turns: int = knob(
        8, "With context=fold or subagent, ends a branch after this many turns.", ge=1, le=1000
    )
    branch_instruction: str = knob(
        "",
        "With context=fold or subagent, adds this text to the first message. Empty adds a built-in"
        " explanation of branches.",
    )

    endpoint: bool = knob(
        False, "Lets programs of the user (actor.agent) play the episodes through a chat endpoint."
    )
    agent: list[str] = knob(
        [], "With endpoint=true, sets the command line of the program that plays the episodes."
    )
    agent_lifetime: AgentLifetime = knob(
        AgentLifetime.EPISODE, "Selects the lifetime of a process of actor.agent."
    )
    num_agents: int = knob(
        1, "With agent_lifetime=run, starts this many programs beside each actor.", ge=1, le=1000
    )
    agents: AgentServerOptions = field(default_factory=AgentServerOptions)
    seats: SeatsOptions = field(default_factory=SeatsOptions)

    @property
    def reflects(self) -> bool:
        """Whether an episode can contain reflections."""
        return self.reflect_every > 0 or self.reflect_on_invalid

    @property
    def has_segments(self) -> bool:
        """Whether an episode can have several training rows."""
        is_rewritten = self.keep_thinking is not KeepThinking.ALL
        return self.endpoint or is_rewritten or self.context is not ContextKind.FULL

    @property
    def parts_turns(self) -> bool:
        """Whether the sampled tokens of one turn can be in several training rows."""
        is_parted = self.context is ContextKind.SUMMARY and self.learn_summaries
        return self.endpoint or self.has_branches or is_parted

    @property
    def has_branches(self) -> bool:
        """Whether a policy can open branches."""
        return self.context in (ContextKind.FOLD, ContextKind.SUBAGENT)

    def of_text(self) -> "AgentOptions":
        """Return the options for a text-only policy, which always gets the whole context."""
        return AgentOptions(**{name: getattr(self, name) for name in OF_ANSWERS})

    def of_answers(self) -> dict[str, object]:
        """Return the non-default options that change an episode."""
        options = {name: getattr(self, name) for name in OF_ANSWERS}
        return {name: value for name, value in options.items() if value not in ("plain", 0)}

    def contradictions_of_agents(self) -> Iterator[Contradiction]:
        """Yield options that need an external agent, or that an external agent cannot support."""
        if self.endpoint != bool(self.agent):
            law = "actor.agent and actor.endpoint=true need each other; set both or neither"
            yield "actor.agent", self.agent, law
        ignored = {
            "context": (self.context.value, "full"),
            "format": (self.format.value, "plain"),
            "plan": (self.plan, False),
            "reflect_every": (self.reflect_every, 0),
            "reflect_on_invalid": (self.reflect_on_invalid, False),
            "keep_thinking": (self.keep_thinking.value, "all"),
        }
        for name, (value, only) in ignored.items() if self.endpoint else ():
            law = f"must be {only} with actor.endpoint=true: an agent manages its own history"
            if value != only:
                yield f"actor.{name}", value, law

    def _contradictions_of_thoughts(self) -> Iterator[Contradiction]:
        """Yield options that repeat an answer in a form in which its thoughts cannot be dropped."""
        if self.keep_thinking is KeepThinking.ALL:
            return
        key = "actor.keep_thinking"
        if self.context not in (ContextKind.FULL, ContextKind.WINDOW):
            law = f"must be all beside actor.context={self.context.value}"
            yield key, self.keep_thinking.value, law
        if self.plan or self.reflects:
            law = "must be all beside actor.plan and actor.reflect_*"
            yield key, self.keep_thinking.value, law

    def contradictions_of_rows(
        self, algorithm: AlgorithmSection, envhub: "HubStyle", policy: "PolicySection"
    ) -> Iterator[Contradiction]:
        """Yield options that do not work if an episode has several training rows.

        It also yields options that do not fit the format of the answers.
        """
        yield from self.contradictions_of_agents()
        if self.has_branches and (self.plan or self.reflects):
            law = "must be full, window or summary with actor.plan and actor.reflect_*"
            yield "actor.context", self.context.value, law
        yield from self._contradictions_of_thoughts()
        if self.format is AgentFormat.FUNCTION_CALL:
            law = "must be {} with actor.format=function_call: {}"
            if envhub.style == "agentgym":
                why = "the instructions of this style demand answers in ReAct's format"
                yield "envhub.style", envhub.style, law.format("compact or instructed", why)
            if policy.url:
                yield (
                    "policy.url",
                    policy.url,
                    law.format('""', "that format needs the model's own chat template"),
                )
        found: list[tuple[str, object]] = []
        if algorithm.policy_loss is PolicyLoss.GSPO:
            found.append(("algorithm.policy_loss", algorithm.policy_loss.value))
        if algorithm.correction in (Correction.SEQUENCE_TIS, Correction.GEOMETRIC):
            found.append(("algorithm.correction", algorithm.correction.value))
        if algorithm.negative_mask_delta > 0:
            found.append(("algorithm.negative_mask_delta", algorithm.negative_mask_delta))
        where = "endpoint=true" if self.endpoint else f"context={self.context.value}"
        if not self.endpoint and self.context is ContextKind.FULL:
            where = f"keep_thinking={self.keep_thinking.value}"
        for key, value in found if self.has_segments else []:
            law = "computes a ratio over a whole episode, but an episode has several training rows"
            yield key, value, f"{law} with actor.{where}"
        if algorithm.policy_loss is PolicyLoss.TURN and self.parts_turns:
            law = "computes a ratio over a whole turn, but a turn may have several training rows"
            remedy = "use policy_loss=ppo, or actor.context=full or window"
            yield "algorithm.policy_loss", "turn", f"{law} with actor.{where}; {remedy}"


class EvalItems(StrEnum):
    """Held-out items of the command `eval`.

    spread: the first items of each configured subset, by the tasks' weights. tasks: the test lists
    of the catalogue's tasks; the configured subsets must be among them. paper: the test sets of
    AgentGym-RL's Tables 1 to 5, with the number of turns of its evaluation. For tasks and paper,
    all items are used, unless the command line also sets `eval.num_items`.
    """

    SPREAD = "spread"
    TASKS = "tasks"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Held-out evaluation, always with the full horizon."""

    num_items: int = knob(
        400,
        "Evaluates this many held-out items, spread over the tasks by weight. -1 means all.",
        ge=-1,
        le=10**6,
    )
    before: bool = knob(True, "Evaluates the first policy before training.")
    after: bool = knob(True, "Evaluates the last policy after training.")
    baselines: bool = knob(
        True, "Evaluates random valid play and the scripted expert on the same items."
    )
    every_steps: int = knob(
        0, "Evaluates during training every this many steps. 0 turns it off.", ge=0
    )
    stream_items: int = knob(
        128, "Plays this many held-out items in each evaluation during training.", ge=1, le=10**6
    )
    k: int = knob(1, "Samples each item this many times with the command `eval`.", ge=1, le=4096)
    items: EvalItems = knob(EvalItems.SPREAD, "Selects the held-out items of the command `eval`.")
    label: str = knob(
        "", "Names the row of the command `eval` in its table. Empty uses the model's name."
    )
    max_failed_frac: float = knob(
        0.05,
        "Limits the share of failed episodes of the command `eval`. Above it the exit code is 1.",
        ge=0,
        le=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySection:
    """A policy behind an OpenAI-compatible endpoint, for the command `eval` only.

    The command `serve` provides such an endpoint. It requires the key from the variable
    `api_key_env`.
    """

    url: str = knob(
        "",
        "Names the URL of a chat endpoint, such as https://host/v1. Empty plays model.path in an "
        "engine on this machine.",
        form=URL,
        also="",
    )
    model: str = knob("", "Names the model at the endpoint.")
    api_key_env: str = knob(
        "",
        "Names the environment variable with the API key. Empty sends no key.",
        form=WORD,
        also="",
    )
    port: int = knob(
        0,
        "Sets the port at which the command `serve` listens. 0 chooses a free one.",
        ge=0,
        le=65535,
    )
    max_model_len: int = knob(
        0,
        "Sets the context of the command `serve` in tokens, for prompt and answer together. 0 "
        "takes the model's whole context, as far as the KV cache (actor.kv_cache_gib) holds it. "
        "With policy.role, 0 takes actor.max_model_len.",
        ge=0,
    )
    role: str = knob(
        "",
        "Names the role that the command `serve` has in the run `run.name`. The run then finds its "
        "address and observes it. Empty serves no run.",
        form=WORD,
        also="",
    )
    past_every_s: float = seconds(
        0.0,
        "Serves a past version of the run policy.role belongs to with the command `serve`, and "
        "another one after this many seconds. 0 serves model.path.",
        ge=0,
    )
    temperature: float = knob(1.0, "Sets the sampling temperature of the endpoint.", ge=0, le=100)
    max_turn_tokens: int = knob(
        1024, "Limits the sampled tokens of a turn, including hidden reasoning.", ge=1
    )
    limit_key: str = knob(
        "max_tokens", "Selects the request field for policy.max_turn_tokens.", one_of=LIMIT_KEYS
    )
    max_concurrent: int = knob(
        16, "Limits the concurrent requests to the endpoint.", ge=1, le=10**5
    )
    timeout_s: float = seconds(
        300.0, "Limits the seconds in which the endpoint must answer a request.", gt=0
    )
    max_tries: int = knob(
        6, "Limits the tries of a turn. An episode fails if none is answered.", ge=1, le=1000
    )
    backoff_s: float = seconds(
        1.0,
        "Sets the seconds before the second try. The wait doubles with each further try.",
        ge=0,
        must="be at most max_backoff_s",
    )
    max_backoff_s: float = seconds(
        60.0, "Limits the seconds between two tries, even if Retry-After is longer.", ge=0
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.url and not self.model:
            yield "model", self.model, "must name a model of the endpoint policy.url"
        if self.past_every_s and not self.role:
            yield "past_every_s", self.past_every_s, "must be 0 without policy.role"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySection:
    """A study of `bench --suite NAME`: several arms of runs over seeds."""

    workers: int = knob(2, "Limits the concurrent runs of a study.", ge=1, le=10**4)
    size: float = knob(1.0, "Multiplies the steps of every run of a study.", gt=0, le=1000)
    num_seeds: int = knob(
        0, "Runs this many seeds of each arm. 0 uses the suite's own number.", ge=0, le=1000
    )
    only: list[str] = knob(
        [], "Selects runs (ARM-seedN) or arms. [] selects all that are not finished."
    )
    folder: str = knob(
        "", "Names the study's folder below run.dir. Empty means study-SUITE.", form=PATH, also=""
    )
