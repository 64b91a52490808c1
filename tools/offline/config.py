"""The sections `sft`, `dpo` and `evolve`, and the configurations of the commands of these names."""

from dataclasses import dataclass, field, replace

from common.config.actor import ContextKind
from common.config.knobs import NAME, PATH, knob
from common.config.learner import LearnerSection, OptimizerKind
from common.config.run_config import RunConfig

CHECKPOINT_MUON_LR = 3e-4
OPTIMIZERS = ("auto", "adamw", "muon")


def _rated(
    learner: LearnerSection,
    section: "SftSection | DpoSection",
    *,
    usual: tuple[OptimizerKind, float, float],
) -> LearnerSection:
    """Return the learner with the configured rates; the usual ones replace `auto` and 0."""
    kind = usual[0] if section.optimizer == "auto" else OptimizerKind(section.optimizer)
    lr = section.lr or usual[1]
    return replace(learner, optimizer=kind, lr=lr, muon_lr=section.muon_lr or usual[2])


def describe_rates(learner: LearnerSection) -> str:
    """Return the optimizer and its rates as text."""
    is_muon = learner.optimizer is OptimizerKind.MUON
    muon = f" muon_lr={learner.muon_lr:g}" if is_muon else ""
    return f"optimizer={learner.optimizer} lr={learner.lr:g}{muon}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSection:
    """Supervised warm start from demonstrations."""

    output: str = knob(
        "", "Names the folder of the policy. Empty means runs/<name>/policy.", form=PATH, also=""
    )
    overwrite: bool = knob(False, "Allows sft.output to be a policy that ships with the project.")
    demonstrations: str = knob(
        "",
        "Names a file of demonstrations, JSON lines in AgentTraj format. Empty lets the experts "
        "play them.",
    )
    num_demonstrations: int = knob(
        6000, "Lets the experts play this many episodes.", ge=1, le=10**7
    )
    expert_subsets: list[str] = knob(
        [], "Lists the subsets that the expert plays. [] means those of the tasks.", form=NAME
    )
    contexts: list[ContextKind] = knob(
        [], "Lists context kinds that the demonstrations use in turn. [] means actor.context."
    )
    min_reward: float = knob(0.0, "Leaves out episodes with a smaller reward.", ge=-1e6)
    max_episodes: int = knob(
        0, "Trains on this many of the newest remaining episodes. 0 means all.", ge=0
    )
    random_frac: float = knob(
        0.3, "Sets the share of demonstrations with random valid play over the mixture.", ge=0, le=1
    )
    slip_frac: float = knob(
        0.0,
        "Replaces the expert's action by a random one in this share of the turns. Random actions "
        "are not trained.",
        ge=0,
        lt=1,
    )
    num_epochs: int = knob(3, "Passes over the demonstrations this many times.", ge=1)
    prompt_coef: float = knob(
        0.0,
        "Sets the loss weight of tokens that the agent reads. Tokens that it writes have weight 1.",
        ge=0,
        le=1,
    )
    batch_tokens: int = knob(4096, "Sets the number of tokens of one optimizer step.", ge=1)
    optimizer: str = knob(
        "auto",
        "Selects the optimizer. auto means learner.optimizer for a policy that is made from "
        "scratch, and adamw for a checkpoint.",
        one_of=OPTIMIZERS,
    )
    lr: float = knob(
        0.0,
        "Sets the learning rate. With muon, it holds for embeddings, head and norms. 0 chooses "
        "1e-3 for a policy that is made from scratch, 2e-5 for a checkpoint, 2e-4 for adapters.",
        ge=0,
        le=10,
    )
    muon_lr: float = knob(
        0.0,
        "With muon, sets the learning rate of the hidden matrices. 0 chooses 0.02 for a policy "
        "that is made from scratch, and 3e-4 for a checkpoint.",
        ge=0,
        le=10,
    )
    hidden_size: int = knob(
        128, "Sets the hidden size of a policy that is made from scratch.", ge=8, le=65536
    )
    num_layers: int = knob(
        4, "Sets the number of layers of a policy that is made from scratch.", ge=1, le=1000
    )
    num_heads: int = knob(
        4,
        "Sets the number of attention heads of a policy that is made from scratch.",
        ge=1,
        le=1024,
        must="divide hidden_size",
    )
    num_kv_heads: int = knob(
        2,
        "Sets the number of key-value heads of a policy that is made from scratch.",
        ge=1,
        le=1024,
        must="divide num_heads",
    )
    intermediate_size: int = knob(
        512,
        "Sets the width of the feed-forward layers of a policy that is made from scratch.",
        ge=1,
        le=10**6,
    )
    vocab_size: int = knob(
        640,
        "Sets the size of the vocabulary of a policy that is made from scratch. It contains every "
        "byte.",
        ge=300,
        le=10**7,
    )
    from_scratch: bool = knob(
        False, "Makes a new tokenizer and new weights. `false` starts from model.path."
    )

    def rated(self, learner: LearnerSection) -> LearnerSection:
        """Return the learner with the optimizer and the rates for the kind of start."""
        usual = (learner.optimizer, 1e-3, 0.02)
        if not self.from_scratch:
            lr = 2e-4 if learner.lora.rank else 2e-5
            usual = (OptimizerKind.ADAMW, lr, CHECKPOINT_MUON_LR)
        return _rated(learner, self, usual=usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSection:
    """Direct preference optimisation on pairs of episodes of one item (arXiv:2305.18290)."""

    data: str = knob(
        "", "Names a run directory with a journal, or a file in AgentTraj format with rewards."
    )
    output: str = knob(
        "", "Names the folder of the policy. Empty means runs/<name>/policy.", form=PATH, also=""
    )
    beta: float = knob(
        0.1, "Sets the strength of the penalty for leaving the reference policy.", gt=0, le=1000
    )
    keep_chosen: float = knob(
        0.0,
        "Subtracts from the margin this many nats for each nat of log-probability that the chosen "
        "episode has lost against the reference (DPO-Positive).",
        ge=0,
        le=1000,
    )
    sft_coef: float = knob(
        0.0,
        "Sets the weight of the mean negative log-likelihood of the chosen episode (RPO).",
        ge=0,
        le=1000,
    )
    normalize_length: bool = knob(
        False, "Divides log-probabilities by the number of trained tokens."
    )
    min_gap: float = knob(
        0.5,
        "Requires at least this difference in reward between the chosen and the rejected episode "
        "of a pair.",
        gt=0,
        le=1,
    )
    max_pairs_per_item: int = knob(4, "Limits the pairs of an item.", ge=1)
    max_pairs: int = knob(
        0, "Limits the pairs of all items, which are drawn by the seed. 0 uses all.", ge=0
    )
    batch_pairs: int = knob(16, "Sets the number of pairs of one optimizer step.", ge=1)
    num_epochs: int = knob(1, "Passes over the pairs this many times.", ge=1)
    optimizer: str = knob("auto", "Selects the optimizer. auto means adamw.", one_of=OPTIMIZERS)
    lr: float = knob(
        0.0, "Sets the learning rate of AdamW. 0 chooses 5e-7, and 5e-6 for adapters.", ge=0, le=10
    )
    muon_lr: float = knob(
        0.0,
        "With muon, sets the learning rate of the hidden matrices. 0 chooses 3e-4.",
        ge=0,
        le=10,
    )

    def rated(self, learner: LearnerSection) -> LearnerSection:
        """Return the learner with the optimizer and the rates; the start is a checkpoint."""
        lr = 5e-6 if learner.lora.rank else 5e-7
        return _rated(learner, self, usual=(OptimizerKind.ADAMW, lr, CHECKPOINT_MUON_LR))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveSection:
    """AgentEvol: sample, keep successful episodes, train, repeat (arXiv:2406.04151)."""

    output: str = knob(
        "", "Names the folder of the policy. Empty means runs/<name>/policy.", form=PATH, also=""
    )
    num_iterations: int = knob(
        3, "Samples episodes and trains on them this many times.", ge=1, le=10**4
    )
    items_per_iteration: int = knob(
        512,
        "Plays this many training items per iteration, spread over the tasks by weight.",
        ge=1,
        le=10**6,
    )
    samples_per_item: int = knob(2, "Plays each item this many times.", ge=1, le=10**4)
    min_reward: float = knob(
        1.0,
        "Keeps episodes with at least this reward. With 1, all solved episodes are kept, too.",
        ge=-1e6,
    )
    from_base: bool = knob(
        True,
        "Trains the first policy in each iteration, on all episodes kept so far. `false` trains "
        "the newest policy on the new episodes.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(RunConfig):
    """The configuration of `sft`."""

    sft: SftSection = field(default_factory=SftSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(RunConfig):
    """The configuration of `dpo`."""

    dpo: DpoSection = field(default_factory=DpoSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveConfig(SftConfig):
    """The configuration of `evolve`, which trains as `sft` does."""

    evolve: EvolveSection = field(default_factory=EvolveSection)
