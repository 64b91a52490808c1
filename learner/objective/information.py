"""Mutual information between prompt and response. Pure functions."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from common.wire.messages import Trajectory

NUM_PROMPTS = 4  # Number of compared prompts: every answer is scored after every prompt.
MAX_ANSWER_TOKENS = 256  # Only this many first tokens of an answer are scored.


def first_answers(trajectories: Sequence[Trajectory]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prompt, answer) for the first different prompts, at most `NUM_PROMPTS` of them.

    A prompt [seq] contains the tokens before the first sampled token. An answer [seq] contains the
    tokens sampled in the first turn. Episodes without such a prompt or answer are skipped.
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
    """Return an estimate of I(prompt; answer), from the scores of each answer after each prompt.

    I = mean over answers z of log p(z | its own x) - log mean over all x' of p(z | x'). If the
    answers vary but ignore the prompt (template collapse), the entropy stays high and I is 0. For n
    equally likely prompts I is at most log(n), and long answers soon reach this bound. The metric
    therefore detects ignored prompts, but does not measure how strong the dependence is. With one
    answer for each prompt, single estimates are noisy and may be negative: average them over steps.

    Args:
        cross_logprobs: [answer, prompt] nats, log p(answer | prompt) summed over its tokens. The
            diagonal holds each answer's own prompt.

    Returns:
        policy/mutual_information in nats, and policy/prompt_recall: the fraction of answers whose
        own prompt makes them more likely than any other prompt; 1 / n by chance.

    Raises:
        ValueError: the matrix is not square, or smaller than two.

    Source: RAGEN-2, arXiv:2604.06268. Its proxies average over an answer's tokens instead of
    summing. This is not mutual information, but grows with it and has no such bound.
    """
    num, width = cross_logprobs.shape
    if num != width or num < 2:
        raise ValueError(
            f"cross_logprobs must be square [answer >= 2, prompt >= 2], got {(num, width)}"
        )
    scores = cross_logprobs.double()
    own = scores.diagonal()
    marginal = scores.logsumexp(1) - math.log(num)
    others = scores.clone().fill_diagonal_(-math.inf)
    return {
        "policy/mutual_information": (own - marginal).mean().item(),
        "policy/prompt_recall": (own > others.max(1).values).double().mean().item(),
    }
