"""Which device the learner computes on."""

import torch


def pick_device(name: str) -> torch.device:
    """Return the torch device that `learner.device` means."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
