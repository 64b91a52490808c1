"""Rewards and a step function for docs/examples/dataset/questions.jsonl."""

from typing import Any


def is_right(completion: str, ground_truth: str) -> bool:
    """Return whether the last word of the answer is the reference."""
    words = completion.replace(".", " ").split()
    return bool(words) and words[-1].lower() == ground_truth.lower()


async def is_short(completion: str) -> float:
    """Return 1 for one word, and less for more words."""
    return 1 / max(1, len(completion.split()))


def overlap(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return the share of the reference's letters in each answer. It has TRL's signature."""
    pairs = zip(completions, answer, strict=True)
    return [sum(c in text for c in right) / len(right) for text, right in pairs]


def hint(completion: str, ground_truth: str, state: dict[str, Any]) -> tuple[str, bool]:
    """Answer a wrong guess with one more letter of the reference."""
    if is_right(completion, ground_truth):
        return "Right.", True
    shown = state.get("num_shown", 0) + 1
    state["num_shown"] = shown
    return f"No. It begins with {ground_truth[:shown]}.", False


def calls(call: dict[str, Any] | None, answer: str) -> float:
    """Return 1 if the answer calls the right tool, or none where none fits."""
    return float((call or {"tool": ""})["tool"] == answer)
