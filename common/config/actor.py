"""The section `actor`: episodes, context, agents, seats, sampling and the engine."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from common.config.algorithm import Advantage, AlgorithmSection, PolicyLoss, RowCredit
from common.config.envhub import EnvhubSection
from common.config.horizon import MAX_STAGE
from common.config.knobs import HOST, PATH, PEER_NAME, URL, WORD, Contradiction, knob, seconds

OF_ANSWERS = ("format", "plan", "reflect_every", "reflect_on_invalid")
PORT = "{port}"  # Stands for the port in `actor.agents.advertise`.
# Players of seats. All other opponents are model folders.
SELF = "self"  # The current policy.
RANDOM = "random"  # Random valid play.
EXPERT = "expert"  # The environment's scripted expert.
PAST = "checkpoints"  # A past version of the run.
ENDPOINT = "url"  # The model at `actor.seats.url`.
NAMED = (SELF, RANDOM, EXPERT, PAST, ENDPOINT)
LARGEST_BLOCK_TOKENS = 128  # Largest block of a KV cache; engines may use smaller ones.
# vLLM's arguments that the project sets itself, with the key that sets each. Without a key, the
# value is fixed.
OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "max_model_len": "actor.max_model_len",
    "max_num_seqs": "actor.max_concurrent",
    "tensor_parallel_size": "actor.tensor_parallel_size",
    "pipeline_parallel_size": "actor.tensor_parallel_size",
    "data_parallel_size": "actor.num_actors",
    "gpu_memory_utilization": "actor.gpu_memory_frac",
    "num_gpu_blocks_override": "actor.kv_cache_blocks",
    "enforce_eager": "actor.enforce_eager",
    "enable_sleep_mode": "actor.sleep",
    "enable_prefix_caching": "actor.prefixes_at_update",
    "enable_lora": "learner.lora.rank",
    "max_lora_rank": "learner.lora.rank",
    "lora_target_modules": "learner.lora.targets",
    "max_loras": "",
    "additional_config": "",
    "config_format": "",
    "disable_log_stats": "",
    "distributed_executor_backend": "",
    "load_format": "",
    "logprobs_mode": "",
    "scheduler_cls": "",
    "skip_tokenizer_init": "",
    "weight_transfer_config": "",
    "worker_cls": "",
    "worker_extension_cls": "",
}


class GpuPlacement(StrEnum):
    """Placement of the engines on GPUs.

    apart: on GPUs of their own. colocated: on the learner's GPUs. auto: apart if there are enough
    GPUs, else colocated.
    """

    AUTO = "auto"
    APART = "apart"
    COLOCATED = "colocated"


class AtUpdate(StrEnum):
    """Handling of keys and values from older weights when an engine loads new weights."""

    KEEP = "keep"
    DROP = "drop"


class EnforceEager(StrEnum):
    """Execution of the engine's model.

    true: one kernel after the other, ready at once. false: compiled, with CUDA graphs on a GPU.
    The first start with a model compiles for a minute or more. vLLM keeps the result in the user's
    cache folder. auto: false on CUDA, true on a CPU.
    """

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


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
class SeatsOptions:
    """Players of the seats that an episode does not train. See docs/SEATS.md."""

    trained: list[int] = knob(
        [],
        "Lists the seats, from 0 on, that the policy plays and learns from. Each group has one of "
        "them. [] means all seats.",
        ge=0,
        le=1000,
    )
    opponents: list[str] = knob(
        [SELF],
        "Lists the players of the other seats in training: self, random, expert, checkpoints, url, "
        "or a model folder. Each group has one of them.",
        form=PATH,
    )
    eval_opponents: list[str] = knob(
        [RANDOM],
        "Lists the players of the other seats in evaluations: random, expert, self, url, or a "
        "model folder. Each sample of an item has one of them.",
        form=PATH,
    )
    num_past: int = knob(1, "Starts this many engines for the opponent checkpoints.", ge=1, le=1000)
    past_every_s: float = seconds(
        600.0,
        "Gives an engine of the opponent checkpoints another past version after this many seconds.",
        gt=0,
    )
    url: str = knob(
        "",
        "Names the base URL of a chat endpoint for the opponent `url`, such as "
        "http://host:8000/v1.",
        form=URL,
        also="",
    )
    model: str = knob("", "Names the model at actor.seats.url.")
    api_key_env: str = knob(
        "",
        "Names the environment variable with the key of actor.seats.url. Empty sends no key.",
        form=WORD,
        also="",
    )
    timeout_s: float = seconds(
        60.0, "Limits the seconds of one request to an opponent.", gt=0, le=3600
    )
    max_tries: int = knob(
        6,
        "Limits the tries of an opponent's turn. Without an answer the episode fails; it gets no "
        "reward.",
        ge=1,
        le=1000,
    )
    serve: list[str] = knob(
        [], "Lists overrides for the engines of opponents that are model folders, as KEY=VALUE."
    )
    gpus: list[int] = knob(
        [],
        "Lists the number of a GPU for each engine of an opponent, first of the folders, then of "
        "the past versions. [] means GPUs that no role uses.",
        ge=0,
        le=1000,
    )

    def folders(self, *, in_training: bool = True) -> list[str]:
        """Return the model folders among the opponents, each once.

        Args:
            in_training: include the opponents of training.
        """
        names = [*(self.opponents if in_training else ()), *self.eval_opponents]
        return [name for name in dict.fromkeys(names) if name not in NAMED]

    def contradictions(self) -> Iterator[Contradiction]:
        for name in ("opponents", "eval_opponents"):
            if not getattr(self, name):
                yield name, [], f"must name at least one of {', '.join(NAMED)}, or a model folder"
        if PAST in self.eval_opponents:
            law = "cannot name checkpoints: an evaluation needs fixed opponents. Name a folder"
            yield "eval_opponents", self.eval_opponents, law
        is_asked = ENDPOINT in (*self.opponents, *self.eval_opponents)
        if is_asked and not self.url:
            yield "url", "", "must name the endpoint of the opponent `url`"
        if self.url and not self.model:
            yield "model", "", "must name the model at actor.seats.url"
        for override in self.serve:
            if "=" not in override:
                yield "serve", override, "must be KEY=VALUE, such as actor.gpu_memory_frac=0.3"


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
        [],
        "With endpoint=true, sets the command line of the program that plays the episodes, or "
        "names a harness: codex, opencode, qwen-code, mini-swe-agent, aider, terminus or "
        "openhands.",
    )
    harnesses: str = knob(
        "",
        "Names the folder in which a harness that actor.agent names is installed. The sandbox must "
        "show it (envs.sandbox.mounts). Empty is a folder below /var/tmp.",
        form=PATH,
        also="",
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
        self, algorithm: AlgorithmSection, envhub: EnvhubSection
    ) -> Iterator[Contradiction]:
        """Yield options that do not work if an episode has several training rows.

        It also yields options that do not fit the format of the answers.
        """
        yield from self.contradictions_of_agents()
        if self.has_branches and (self.plan or self.reflects):
            law = "must be full, window or summary with actor.plan and actor.reflect_*"
            yield "actor.context", self.context.value, law
        yield from self._contradictions_of_thoughts()
        if self.format is AgentFormat.FUNCTION_CALL and envhub.style == "agentgym":
            law = "must be compact or instructed with actor.format=function_call: the instructions"
            yield (
                "envhub.style",
                "agentgym",
                f"{law} of this style demand answers in ReAct's format",
            )
        if algorithm.row_credit is not RowCredit.ALL:
            credit = algorithm.row_credit.value
            if not self.endpoint:
                law = "must be all without actor.endpoint=true: only an agent has conversations"
                yield "algorithm.row_credit", credit, law
            if algorithm.advantage is Advantage.PPO:
                law = "must be all with algorithm.advantage=ppo: a critic's credit passes all rows"
                yield "algorithm.row_credit", credit, law
        where = "endpoint=true" if self.endpoint else f"context={self.context.value}"
        if not self.endpoint and self.context is ContextKind.FULL:
            where = f"keep_thinking={self.keep_thinking.value}"
        for key, value in algorithm.episode_ratios if self.has_segments else []:
            law = "computes a ratio over a whole episode, but an episode has several training rows"
            yield key, value, f"{law} with actor.{where}"
        if algorithm.policy_loss is PolicyLoss.TURN and self.parts_turns:
            law = "computes a ratio over a whole turn, but a turn may have several training rows"
            remedy = "use policy_loss=ppo, or actor.context=full or window"
            yield "algorithm.policy_loss", "turn", f"{law} with actor.{where}; {remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSection(AgentOptions):
    """The actors: episodes, sampling, the engine and its timeouts."""

    num_actors: int = knob(
        1, "Starts this many actors. More may join at any time.", ge=0, le=10_000
    )
    num_spares: int = knob(
        0, "Starts this many spare actors. A spare plays while an actor is absent.", ge=0, le=1000
    )
    engines_per_process: int = knob(
        1, "Sets the number of engines of one actor process. See docs/SCALE.md.", ge=1, le=256
    )
    name: str = knob(
        "",
        "Names an actor that is started alone. Empty derives the name from host and process id.",
        form=PEER_NAME,
        also="",
    )
    max_concurrent: int = knob(64, "Limits the concurrent episodes of one engine.", ge=1, le=10**5)
    adapt_concurrency: bool = knob(
        True, "Lowers the concurrency while the engine cannot keep up. Sync mode ignores it."
    )
    min_concurrent: int = knob(
        1,
        "Sets the number of episodes below which the concurrency never falls.",
        ge=1,
        le=10**5,
        must="be at most max_concurrent",
    )
    max_model_len: int = knob(
        512,
        "Limits the tokens of the context. actor.context selects what happens to longer episodes.",
        ge=16,
        le=MAX_STAGE,
    )
    continue_episodes: bool = knob(
        True,
        "Continues an episode at its last turn after the loss of its hub or its actor. False begins"
        " it anew.",
    )
    max_turn_tokens: int = knob(
        16, "Limits the sampled tokens of a turn.", ge=1, must="be < max_model_len"
    )
    temperature: float = knob(
        1.0, "Sets the sampling temperature. The learner divides logits by it, too.", ge=0.01, le=2
    )
    kv_cache_gib: int = knob(
        1, "Sets the size of the KV cache of a CPU engine, in GiB.", ge=1, le=10_000
    )
    kv_cache_blocks: int = knob(
        0,
        "Sets the blocks of the KV cache, 32 tokens each on a CPU. 0 uses the available memory.",
        ge=0,
    )
    gpu_memory_frac: float = knob(
        0.85, "Sets the share of the GPU's memory that the engine uses.", gt=0, le=1
    )
    kv_at_update: AtUpdate = knob(
        AtUpdate.KEEP,
        "Selects whether a running turn keeps its KV cache at new weights or recomputes it.",
    )
    prefixes_at_update: AtUpdate = knob(
        AtUpdate.DROP,
        "Selects whether later turns reuse KV cache of older weights or recompute it.",
    )
    tensor_parallel_size: int = knob(1, "Sets the number of devices of one engine.", ge=1, le=64)
    num_gpus: int = knob(
        0,
        "Sets the number of GPUs of all engines. 0 means tensor_parallel_size for each engine.",
        ge=0,
        le=10_000,
    )
    placement: GpuPlacement = knob(
        GpuPlacement.AUTO, "Selects whether engines share GPUs with the learner."
    )
    sleep: int = knob(
        0,
        "Gives the engine's GPU memory to the learner during its step, with placement=colocated "
        "and train.mode=sync. 1 keeps the weights in host memory, 2 keeps nothing. 0 turns it off.",
        ge=0,
        le=2,
    )
    enforce_eager: EnforceEager = knob(
        EnforceEager.AUTO, "Runs the engine without compilation and CUDA graphs."
    )
    engine_args: dict[str, Any] = knob(
        {}, "Passes arguments to vLLM, by the names of its AsyncEngineArgs. See docs/ENGINE.md."
    )
    turn_timeout_s: float = seconds(
        300.0, "Limits the seconds in which the tokens of a turn must be sampled.", gt=0
    )
    episode_timeout_s: float = seconds(
        1800.0,
        "Limits the seconds in which an episode must end.",
        gt=0,
        must="be >= turn_timeout_s",
    )
    env_timeout_s: float = seconds(
        60.0, "Limits the seconds in which the hub must answer a request.", gt=0
    )
    start_timeout_s: float = seconds(
        300.0, "Limits the seconds in which the engine must start.", gt=0
    )
    delivery_window: int = knob(
        256, "Limits the unacknowledged trajectories. Beyond it the actor waits.", ge=1
    )

    @property
    def num_processes(self) -> int:
        """Number of actor processes that the launcher starts."""
        return self.num_actors + self.num_spares

    @property
    def num_engines(self) -> int:
        """Number of engines that the launcher starts."""
        return self.num_processes * self.engines_per_process

    def contradictions(self) -> Iterator[Contradiction]:
        wanted = self.num_engines * self.tensor_parallel_size
        if self.num_gpus not in (0, wanted):
            width = f"actor.tensor_parallel_size={self.tensor_parallel_size}"
            spares = f" + actor.num_spares={self.num_spares}" if self.num_spares else ""
            engines = f"actor.num_actors={self.num_actors}{spares}"
            if self.engines_per_process > 1:
                width = f"actor.engines_per_process={self.engines_per_process} x {width}"
            law = f"must be 0 or ({engines}) x {width} = {wanted}"
            yield "num_gpus", self.num_gpus, law
        blocks_for = self.kv_cache_blocks * LARGEST_BLOCK_TOKENS
        if 0 < blocks_for < (longest := self.max_model_len):
            law = f"too few blocks for one episode of actor.max_model_len={longest} tokens"
            yield "kv_cache_blocks", self.kv_cache_blocks, law
        if self.prefixes_at_update is AtUpdate.KEEP and self.kv_at_update is AtUpdate.DROP:
            law = "must be drop with actor.kv_at_update=drop, which empties the whole cache"
            yield "prefixes_at_update", self.prefixes_at_update.value, law
        yield from contradictions_of_engine_args(self.engine_args)


def contradictions_of_engine_args(arguments: dict[str, Any]) -> Iterator[Contradiction]:
    """Yield the arguments of `actor.engine_args` that the project sets itself."""
    for name in sorted(arguments.keys() & OWN_ENGINE_ARGS.keys()):
        key = OWN_ENGINE_ARGS[name]
        law = f"the project sets this argument of vLLM; use {key} instead"
        if not key:
            law = "the project fixes this argument of vLLM; remove it"
        yield f"engine_args.{name}", arguments[name], law
