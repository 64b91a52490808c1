"""How much of what the policy answers depends on what it was asked. Pure functions."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from common.wire.messages import Trajectory

NUM_PROMPTS = 4  # that are compared: every answer is scored after every prompt
MAX_ANSWER_TOKENS = 256  # of an answer, its first ones


def first_answers(trajectories: Sequence[Trajectory]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prompt, answer) of at most `NUM_PROMPTS` unlike prompts, the first ones.

    A prompt [seq] is what an episode begins with before the first sampled token, an answer [seq]
    what its first turn sampled. Episodes in which something else comes first are passed over.
    """
    found: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
    for each in trajectories:
        begins = int(np.argmax(each.loss_mask))
        is_answer = each.loss_mask[begins:] & (each.turn_ids[begins:] == 0)
        length = min(int(np.argmin(np.append(is_answer, False))), MAX_ANSWER_TOKENS)
        if not begins or not length:
            continue
        prompt = each.token_ids[:begins]
        found.setdefault(prompt.tobytes(), (prompt, each.token_ids[begins : begins + length]))
        if len(found) == NUM_PROMPTS:
            break
    return list(found.values())


def mutual_information(cross_logprobs: Tensor) -> dict[str, float]:
    """Return an estimate of I(prompt; answer) from answers scored after one another's prompts.

    I = mean over answers z of log p(z | its own x) - log mean over all x' of p(z | x'). A policy
    whose answers vary but ignore the prompt (template collapse) has all of its entropy and an I
    of 0. Of n prompts taken alike it is at most log(n), which long answers soon reach: it tells
    that prompts are ignored, not how much is known of them. One answer a prompt: single estimates
    scatter, below 0, too; read the mean over steps.

    Args:
        cross_logprobs: [answer, prompt] nats, log p(answer | prompt) summed over its tokens; each
            answer's own prompt is on the diagonal.

    Returns:
        policy/mutual_information in nats, and policy/prompt_recall: the share of answers that
        their own prompt makes likelier than any other one does; 1 / n by chance.

    Raises:
        ValueError: it is not square, or smaller than two.

    Source: RAGEN-2, arXiv:2604.06268. Its proxies take the mean over an answer's tokens instead
    of the sum, which is no mutual information but grows with it and has no such bound.
    """
    num, width = cross_logprobs.shape
    if num != width or num < 2:
        raise ValueError(f"need [answer, prompt] of two or more each, got {(num, width)}")
    scores = cross_logprobs.double()
    own = scores.diagonal()
    marginal = scores.logsumexp(1) - math.log(num)
    others = scores.clone().fill_diagonal_(-math.inf)
    return {
        "policy/mutual_information": (own - marginal).mean().item(),
        "policy/prompt_recall": (own > others.max(1).values).double().mean().item(),
    }
