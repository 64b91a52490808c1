"""Options of SFT, DPO, AgentEvol and the simulator."""

from dataclasses import dataclass

from common.config.evaluation import ContextKind
from common.config.knobs import NAME, PATH, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSection:
    """Supervised warm start from demonstrations."""

    output: str = knob(
        "", "Folder of the policy. Empty means runs/<name>/policy.", form=PATH, also=""
    )
    overwrite: bool = knob(False, "Allows sft.output to be a policy that ships with the project.")
    demonstrations: str = knob(
        "", "JSON lines in AgentTraj format. Empty lets the experts make them."
    )
    num_demonstrations: int = knob(6000, "The experts play this many episodes.", ge=1, le=10**7)
    expert_subsets: list[str] = knob(
        [], "Subsets that the expert plays. [] means those of the tasks.", form=NAME
    )
    contexts: list[ContextKind] = knob(
        [], "Context kinds of the demonstrations, in turn. [] means actor.context."
    )
    min_reward: float = knob(0.0, "Leaves out episodes with a smaller reward.", ge=-1e6)
    max_episodes: int = knob(
        0, "Trains on the newest of the remaining episodes. 0 means all.", ge=0
    )
    random_frac: float = knob(
        0.3, "Share of demonstrations that are random valid play over the mixture.", ge=0, le=1
    )
    slip_frac: float = knob(
        0.0,
        "In this share of the turns a random action replaces the expert's; it is not trained.",
        ge=0,
        lt=1,
    )
    num_epochs: int = knob(3, "Passes over the demonstrations.", ge=1)
    prompt_coef: float = knob(
        0.0,
        "Weight of a token that the agent reads; its own tokens weigh 1. 0 leaves it out.",
        ge=0,
        le=1,
    )
    batch_tokens: int = knob(4096, "Tokens of one optimizer step.", ge=1)
    lr: float = knob(
        1e-3,
        "Learning rate. With learner.optimizer=muon, that of embeddings, head and norms.",
        gt=0,
        le=10,
    )
    muon_lr: float = knob(
        0.02, "With learner.optimizer=muon, learning rate of the hidden matrices.", gt=0, le=10
    )
    hidden_size: int = knob(
        128, "Hidden size of a policy that is made from scratch.", ge=8, le=65536
    )
    num_layers: int = knob(
        4, "Number of layers of a policy that is made from scratch.", ge=1, le=1000
    )
    num_heads: int = knob(
        4,
        "Number of attention heads of a policy that is made from scratch.",
        ge=1,
        le=1024,
        must="divide hidden_size",
    )
    num_kv_heads: int = knob(
        2,
        "Number of key-value heads of a policy that is made from scratch.",
        ge=1,
        le=1024,
        must="divide num_heads",
    )
    intermediate_size: int = knob(
        512,
        "Width of the feed-forward layers of a policy that is made from scratch.",
        ge=1,
        le=10**6,
    )
    vocab_size: int = knob(
        640,
        "Vocabulary of a policy that is made from scratch; it has each byte at least.",
        ge=300,
        le=10**7,
    )
    from_scratch: bool = knob(
        True, "Makes a tokenizer and weights. `false` starts from model.path."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSection:
    """Direct preference optimisation on pairs of episodes of one item (arXiv:2305.18290)."""

    data: str = knob(
        "", "Run directory whose journal is read, or a file in AgentTraj format with rewards."
    )
    output: str = knob("runs/dpo-policy", "Folder of the policy.", form=PATH)
    beta: float = knob(0.1, "Sets how strongly the policy is held at the reference.", gt=0, le=1000)
    keep_chosen: float = knob(
        0.0, "Nats of margin per nat that the chosen episode loses (DPO-Positive).", ge=0, le=1000
    )
    sft_coef: float = knob(
        0.0,
        "Weight of the mean negative log-likelihood of the chosen episode (RPO).",
        ge=0,
        le=1000,
    )
    normalize_length: bool = knob(
        False, "Divides log-probabilities by the number of trained tokens."
    )
    min_gap: float = knob(
        0.5,
        "Pairs need at least this difference in reward between chosen and rejected.",
        gt=0,
        le=1,
    )
    max_pairs_per_item: int = knob(4, "Limits the pairs of an item.", ge=1)
    max_pairs: int = knob(
        0, "Limits the pairs of all items, which are drawn by the seed. 0 uses all.", ge=0
    )
    batch_pairs: int = knob(16, "Pairs of one optimizer step.", ge=1)
    num_epochs: int = knob(1, "Passes over the pairs.", ge=1)
    lr: float = knob(5e-7, "Sets the learning rate of AdamW.", gt=0, le=10)
    muon_lr: float = knob(
        3e-4, "With learner.optimizer=muon, learning rate of the hidden matrices.", gt=0, le=10
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveSection:
    """AgentEvol: sample, keep successful episodes, train, repeat (arXiv:2406.04151)."""

    output: str = knob("runs/evolve-policy", "Folder of the policies.", form=PATH)
    num_iterations: int = knob(3, "Samples and trains this many times.", ge=1, le=10**4)
    items_per_iteration: int = knob(
        512,
        "Plays this many training items per iteration, spread over the tasks by weight.",
        ge=1,
        le=10**6,
    )
    samples_per_item: int = knob(2, "Plays each item this many times.", ge=1, le=10**4)
    min_reward: float = knob(
        1.0, "Keeps episodes with at least this reward. With 1, solved ones are kept too.", ge=-1e6
    )
    from_base: bool = knob(
        True, "Trains the first policy each time, on all episodes that were kept so far."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSection:
    """Assumptions of the command `simulate`. All other values come from the run's configuration.

    The actors are modelled from these keys, also with `from_run`. The keys of episodes and steps
    are used only without `from_run`.
    """

    hours: float = knob(
        0.0,
        "Simulates this many hours of virtual time. 0 simulates train.num_steps.",
        ge=0,
        le=10**6,
    )
    max_episodes: int = knob(
        500_000,
        "Ends the simulation early after this many episodes. Rates hold for the simulated time.",
        ge=1,
        le=10**8,
    )
    mode: str = knob(
        "",
        "Mode to simulate; `both` compares them. Empty means train.mode.",
        one_of=("async", "sync", "both"),
        also="",
    )
    from_run: str = knob(
        "", "Directory of a finished run whose episodes and steps are drawn again."
    )
    compare: str = knob("", "Directory of a finished run that the prediction is compared with.")
    output: str = knob("runs/simulation.json", "File of the result.", form=PATH)
    search: bool = knob(True, "Recommends a number of actors, a bound on lag and a group size.")
    search_steps: int = knob(
        40, "Each simulation of the search makes this many steps.", ge=1, le=10**6
    )

    num_actors: int = knob(0, "Number of actors. 0 means actor.num_actors.", ge=0, le=10**4)
    speed_sigma: float = knob(
        0.0, "Standard deviation of the log of an actor's seconds per turn.", ge=0, le=10
    )
    join_s: float = knob(0.0, "Actors join evenly over this many seconds.", ge=0)
    mtbf_h: float = knob(
        0.0,
        "Mean hours between two failures of an actor. 0 means that none fails.",
        also=0,
        ge=0.01,
    )
    restart_s: float = knob(60.0, "Seconds until a failed actor is back.", ge=0)
    failed_frac: float = knob(0.0, "Share of episodes that fail by the environment.", ge=0, lt=1)
    slot_slowdown: float = knob(
        0.0, "Slows an episode by this share per other episode at its start.", ge=0, le=1000
    )
    delivery_s: float = knob(
        0.05, "Seconds from the end of an episode to the learner's groups.", ge=0
    )

    turn_s: float = knob(3.0, "Median seconds of a turn.", gt=0)
    turn_sigma: float = knob(
        0.4, "Standard deviation of the log of a turn's seconds between episodes.", ge=0, le=10
    )
    num_turns: float = knob(8.0, "Median turns of an episode that no horizon cuts.", ge=1)
    num_turns_sigma: float = knob(
        0.6, "Standard deviation of the log of an episode's turns.", ge=0, le=10
    )
    env_s: float = knob(0.5, "Median seconds of the environment in a turn.", ge=0)
    tail_frac: float = knob(0.02, "Share of episodes whose environment is slow.", ge=0, lt=1)
    tail_factor: float = knob(10.0, "Slow environments take this many times as long.", ge=1)
    success: float = knob(0.5, "Mean success over items, which differ evenly.", gt=0, lt=1)
    turn_tokens: int = knob(
        300, "Tokens of a prompt and its answer, as the learner counts them.", ge=1
    )
    step_s: float = knob(5.0, "Seconds of a step besides its tokens, publishing included.", ge=0)
    learner_tokens_per_s: float = knob(
        8000.0, "The learner trains on this many tokens per second.", gt=0
    )
