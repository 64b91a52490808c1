"""Results of the conformance suite: one finding for each part of a family, kept as JSON lines."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from actor.engine.process_watch import NO_KERNEL
from benchmarks.suite import MACHINE_ERRORS
from common.errors import PASSING, LongstrideError

# Errors of networks and libraries; errors of the machine, such as a full disk, are among them.
NETWORK_ERRORS = (*MACHINE_ERRORS, TypeError, AttributeError, StrictDataclassError)
# Errors whose cause may have passed at the next run: time limits, memory, disk.
OF_MACHINE = re.compile(rf"{PASSING.pattern}| within [\d.]+ s\b", re.IGNORECASE)
TOLERANCE = 1e-4  # Largest difference of two fp32 log-probabilities, in nats.
# Largest mean difference of bf16 and fp32 log-probabilities, in nats. Other weights differ by more
# than one nat on average.
BF16_TOLERANCE = 0.1


class Unmeasured(LongstrideError):
    """The machine prevented a measurement, such as a time limit. A later run repeats it."""


class Verdict(StrEnum):
    """The result of one part of a family; the values are the words of the page."""

    RIGHT = "right"
    ROUNDED = "right in bf16"  # The engine has no fp32; the mean difference is small.
    REFUSED = "refused"  # By the project, before anything starts.
    WRONG = "wrong"
    NO_KERNEL = "without a kernel"  # vLLM has none for a CPU, or a package for GPUs is missing.
    REJECTED = "rejected by the engine"  # By vLLM, in its own words.
    PARTLY = "right in part"  # Only of a whole: a part is refused or was not measured.
    NOT_RUN = "not run"


OF_COMPOSITES = "published layout"  # Other families lack this part.
# Parts of a family's result, in the order of the page's columns.
PARTS = (
    "rollout",
    "sft",
    "full",
    "critic",
    "lora",
    "packed",
    "shared prefix",
    "sharded",
    "publish",
    "checkpoint",
    OF_COMPOSITES,
)
LAYOUTS = ("packed", "shared prefix")  # Parts that a refusal leaves padded.


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The result of one part."""

    verdict: Verdict
    gap: float | None = None  # Largest difference in nats; of sft: relative, of the gradient.
    message: str = ""

    def without(self, folder: Path) -> "PartResult":
        """Return the finding with the names of temporary files removed from its message."""
        words = self.message
        for name in ("start", "first", "second"):
            words = words.replace(str(folder / name), "MODEL")
        return replace(self, message=words.replace(str(folder), "FOLDER"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """All findings of a family."""

    family: str
    architecture: str
    parts: dict[str, PartResult] = field(default_factory=dict[str, PartResult])
    seconds: float = 0.0
    num_params: int = 0  # Weights of a published model at its own size.
    facts: dict[str, str] = field(default_factory=dict[str, str])  # Of a published model.
    commit: str = ""  # Code that was measured, "+changes" for a modified tree.
    layouts_commit: str = ""  # Code of the parts in `LAYOUTS`, if it is another one.
    libraries: dict[str, str] = field(default_factory=dict[str, str])  # Their versions.

    @property
    def verdict(self) -> Verdict:
        """The verdict of the whole: wrong before refused before right, which means all parts."""
        verdicts = [each.verdict for each in self.parts.values()]
        if Verdict.WRONG in verdicts:
            return Verdict.WRONG
        for name in ("full", "rollout"):  # The first one that is not right decides.
            part = self.parts.get(name)
            if part is not None and part.verdict is not Verdict.RIGHT:
                return part.verdict
        measured = self.parts.keys() | (set(PARTS) - {OF_COMPOSITES})
        is_whole = all(
            name in self.parts and self.parts[name].verdict is Verdict.RIGHT for name in measured
        )
        return Verdict.RIGHT if is_whole else Verdict.PARTLY

    @property
    def gap(self) -> float:
        """The largest difference of all parts that are right, in nats."""
        gaps = [
            each.gap or 0.0
            for name, each in self.parts.items()
            if each.verdict is Verdict.RIGHT and name != "sft"
        ]
        return max(gaps, default=0.0)


def compared(gap: float, *, tolerance: float = TOLERANCE, message: str = "") -> PartResult:
    """Return the finding of a measured difference. A NaN is wrong."""
    verdict = Verdict.RIGHT if gap <= tolerance else Verdict.WRONG
    return PartResult(verdict=verdict, gap=gap, message=message)


def rounded(gap: float) -> PartResult:
    """Return the finding of a mean difference in bf16. A NaN is wrong."""
    verdict = Verdict.ROUNDED if gap <= BF16_TOLERANCE else Verdict.WRONG
    return PartResult(verdict=verdict, gap=gap)


def engine_failure(message: str) -> PartResult:
    """Return the finding of an engine that does not start, by its message.

    Raises: Unmeasured: the machine is the cause, such as its memory.
    """
    verdict = Verdict.NO_KERNEL if NO_KERNEL.search(message) else Verdict.REJECTED
    if verdict is Verdict.REJECTED and OF_MACHINE.search(message):
        raise Unmeasured(message)
    return PartResult(verdict=verdict, message=message)


def refused(error: Exception) -> PartResult:
    """Return the finding of a refusal with its message on one line."""
    return PartResult(verdict=Verdict.REFUSED, message=" ".join(str(error).split()))


def append(path: Path, result: FamilyResult) -> None:
    """Add a result to the file."""
    tree = asdict(result)
    if not result.layouts_commit:
        del tree["layouts_commit"]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(tree) + "\n")


def read(path: Path) -> dict[str, FamilyResult]:
    """Return the newest result of each family in the file, {} without a file."""
    if not path.is_file():
        return {}
    results: dict[str, FamilyResult] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        tree = json.loads(line)
        parts = {
            name: PartResult(**{**each, "verdict": Verdict(each["verdict"])})
            for name, each in tree.pop("parts").items()
        }
        results[tree["family"]] = FamilyResult(**tree, parts=parts)
    return results


def rewrite(path: Path, results: Sequence[FamilyResult]) -> None:
    """Write each family or model once."""
    path.unlink(missing_ok=True)
    for result in results:
        append(path, result)
