"""Which policy the surrogate's ratio is taken to. No torch here: a dry run prints it quickly."""

from common.config.learning import AlgorithmSection, LearnerSection, Proximal


def proximal_in_use(algorithm: AlgorithmSection, learner: LearnerSection) -> Proximal:
    """Return what `algorithm.proximal` means, never AUTO: the sampler if a batch is one update."""
    if algorithm.proximal is not Proximal.AUTO:
        return algorithm.proximal
    is_single = learner.ppo_epochs * learner.num_minibatches == 1
    return Proximal.SAMPLER if is_single else Proximal.RECOMPUTED
