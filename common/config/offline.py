"""Options of SFT, DPO, AgentEvol and the simulator."""

from dataclasses import dataclass

from common.config.evaluation import ContextKind
from common.config.knobs import NAME, PATH, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSection:
    """Supervised warm start from demonstrations."""

    output: str = knob("", 'folder of the policy; "": runs/<name>/policy', form=PATH, also="")
    overwrite: bool = knob(False, "sft.output may be a policy that ships with the project")
    demonstrations: str = knob("", 'AgentTraj-format JSON lines; "": made from the experts')
    num_demonstrations: int = knob(6000, "episodes", ge=1, le=10**7)
    expert_subsets: list[str] = knob([], "that the expert plays; []: all of the tasks", form=NAME)
    contexts: list[ContextKind] = knob(
        [], "of the demonstrations, one after the other; []: actor.context"
    )
    min_reward: float = knob(0.0, "episodes worth less are left out", ge=-1e6)
    max_episodes: int = knob(0, "the newest ones of what is left; 0: all", ge=0)
    random_frac: float = knob(0.3, "share of uniform valid play over the mixture", ge=0, le=1)
    slip_frac: float = knob(
        0.0, "share of the players' turns that go wrong on purpose and are not learnt", ge=0, lt=1
    )
    num_epochs: int = knob(3, "passes over the demonstrations", ge=1)
    prompt_coef: float = knob(
        0.0, "weight of a token that the agent only reads, its own weigh 1; 0: no loss", ge=0, le=1
    )
    batch_tokens: int = knob(4096, "tokens of one optimizer step", ge=1)
    lr: float = knob(1e-3, "learner.optimizer=muon: of embeddings, head, norms", gt=0, le=10)
    muon_lr: float = knob(0.02, "learner.optimizer=muon: of the hidden matrices", gt=0, le=10)
    hidden_size: int = knob(128, "of a policy made from nothing", ge=8, le=65536)
    num_layers: int = knob(4, "likewise", ge=1, le=1000)
    num_heads: int = knob(4, "likewise", ge=1, le=1024, must="divide hidden_size")
    num_kv_heads: int = knob(2, "likewise", ge=1, le=1024, must="divide num_heads")
    intermediate_size: int = knob(512, "likewise: width of the feed-forward layers", ge=1, le=10**6)
    vocab_size: int = knob(640, "likewise: tokens, one for each byte at least", ge=300, le=10**7)
    from_scratch: bool = knob(True, "make tokenizer and weights; false: start from model.path")


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSection:
    """Direct preference optimisation on pairs of episodes of one item (arXiv:2305.18290)."""

    data: str = knob("", "a run directory (its journal) or AgentTraj-format file with rewards")
    output: str = knob("runs/dpo-policy", "folder of the policy", form=PATH)
    beta: float = knob(0.1, "how strongly the policy is held at the reference", gt=0, le=1000)
    keep_chosen: float = knob(
        0.0, "nats of margin per nat that the chosen episode loses (DPO-Positive)", ge=0, le=1000
    )
    sft_coef: float = knob(0.0, "of the chosen episode's mean NLL (RPO)", ge=0, le=1000)
    normalize_length: bool = knob(False, "divide log-probabilities by the trained tokens")
    min_gap: float = knob(0.5, "in reward, between chosen and rejected", gt=0, le=1)
    max_pairs_per_item: int = knob(4, "pairs", ge=1)
    max_pairs: int = knob(0, "of all items together, drawn from the seed; 0: all", ge=0)
    batch_pairs: int = knob(16, "pairs of one optimizer step", ge=1)
    num_epochs: int = knob(1, "passes over the pairs", ge=1)
    lr: float = knob(5e-7, "learning rate", gt=0, le=10)
    muon_lr: float = knob(3e-4, "learner.optimizer=muon: of the hidden matrices", gt=0, le=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveSection:
    """AgentEvol: sample, keep successful episodes, train, repeat (arXiv:2406.04151)."""

    output: str = knob("runs/evolve-policy", "folder of the policies", form=PATH)
    num_iterations: int = knob(3, "of sampling and training", ge=1, le=10**4)
    items_per_iteration: int = knob(
        512, "training items, spread over the tasks by weight", ge=1, le=10**6
    )
    samples_per_item: int = knob(2, "episodes", ge=1, le=10**4)
    min_reward: float = knob(1.0, "of an episode that is kept; 1: or that was solved", ge=-1e6)
    from_base: bool = knob(True, "always train the first policy, on all that was kept so far")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSection:
    """Assumptions of the command `simulate`. All other values come from the run's configuration.

    The actors are modelled from these keys, also with `from_run`. The keys of episodes and steps
    are used only without `from_run`.
    """

    hours: float = knob(0.0, "of virtual time; 0: until train.num_steps", ge=0, le=10**6)
    max_episodes: int = knob(
        500_000, "ends early; rates hold for the time it reached", ge=1, le=10**8
    )
    mode: str = knob("", 'both: compare; "": train.mode', one_of=("async", "sync", "both"), also="")
    from_run: str = knob("", "a finished run's directory, whose episodes and steps are drawn again")
    compare: str = knob("", "a finished run's directory to hold the prediction against")
    output: str = knob("runs/simulation.json", "file of the result", form=PATH)
    search: bool = knob(True, "recommend a number of actors, a bound on lag and a group size")
    search_steps: int = knob(40, "steps of each simulation of that search", ge=1, le=10**6)

    num_actors: int = knob(0, "0: as actor.num_actors", ge=0, le=10**4)
    speed_sigma: float = knob(0.0, "of the log of an actor's seconds per turn", ge=0, le=10)
    join_s: float = knob(0.0, "seconds over which actors join evenly", ge=0)
    mtbf_h: float = knob(
        0.0, "mean hours between two deaths of an actor; 0: none dies", also=0, ge=0.01
    )
    restart_s: float = knob(60.0, "seconds until one that died is back", ge=0)
    failed_frac: float = knob(0.0, "of episodes, by the environment", ge=0, lt=1)
    slot_slowdown: float = knob(0.0, "of an episode, per other at its start", ge=0, le=1000)
    delivery_s: float = knob(0.05, "seconds from an episode's end to the learner's groups", ge=0)

    turn_s: float = knob(3.0, "median seconds of a turn", gt=0)
    turn_sigma: float = knob(0.4, "of its log, from one episode to another", ge=0, le=10)
    num_turns: float = knob(8.0, "median of an episode that no horizon cuts", ge=1)
    num_turns_sigma: float = knob(0.6, "of its log", ge=0, le=10)
    env_s: float = knob(0.5, "median seconds of the environment in a turn", ge=0)
    tail_frac: float = knob(0.02, "of episodes whose environment is slow", ge=0, lt=1)
    tail_factor: float = knob(10.0, "x as slow are those", ge=1)
    success: float = knob(0.5, "mean over items, which differ evenly", gt=0, lt=1)
    turn_tokens: int = knob(300, "of prompt and answer, for the learner", ge=1)
    step_s: float = knob(5.0, "seconds of a step, publishing included, beside its tokens", ge=0)
    learner_tokens_per_s: float = knob(8000.0, "tokens the learner trains on", gt=0)
