"""A loss, an advantage and a correction of your own."""


def sapo(inputs, cfg):
    """A soft gate in place of the clip: sigmoid(t (r - 1)) * 4 / t * A, t=1 for A>0, else 1.05."""
    ratio = inputs.log_ratios.exp()
    sharpness = (inputs.advantages <= 0) * 0.05 + 1.0
    gate = (sharpness * (ratio - 1)).sigmoid() * 4 / sharpness
    return -gate * inputs.advantages


def above_median(rewards, members, cfg):
    """The reward minus the median of the group."""
    return rewards - rewards.median()


def root(log_rho, sequence_ids, num_sequences, cfg):
    """The square root of rho, at most tis_cap."""
    return (log_rho / 2).exp().clamp(max=cfg.tis_cap)
