"""The page `docs/MODELS.md`, written from the results of the conformance suite.

The first table has the published models by name, the second one the families.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.conformance.part_results import LAYOUTS, PARTS, FamilyResult, PartResult, Verdict
from benchmarks.conformance.published import PLANS, PublishedModel, published_models
from common.repository import ROOT

PAGE = Path("docs") / "MODELS.md"
HEAD = Path(__file__).with_name("page_head.md").read_text(encoding="utf-8")
CELLS = {
    Verdict.RIGHT: "right",
    Verdict.ROUNDED: "right (bf16)",
    Verdict.REFUSED: "refused",
    Verdict.WRONG: "**wrong**",
    Verdict.NO_KERNEL: "no kernel",
    Verdict.REJECTED: "rejected",
    Verdict.NOT_RUN: "-",
}
TRAINS = {
    Verdict.RIGHT: "right",
    Verdict.PARTLY: "right in part",
    Verdict.ROUNDED: "right (bf16)",
    Verdict.REFUSED: "refused",
    Verdict.WRONG: "**wrong**",
    Verdict.NO_KERNEL: "learner right, engine not tried",
    Verdict.REJECTED: "no",
    Verdict.NOT_RUN: "no",
}
MOST_WORDS = 260  # Characters of a note.


BY_NAME = ("model", "family", "parameters", "starts", "trains", *PLANS, "tried how")


def page_text(
    results: Mapping[str, FamilyResult], published: Mapping[str, FamilyResult] | None = None
) -> str:
    """Return the page: models by name, if there are some, then families."""
    return _head(published or {}) + _families(results)


def _head(published: Mapping[str, FamilyResult]) -> str:
    """Return the head of the page with the table of models by name."""
    models = published_models()
    listed = {name: result for name, result in published.items() if name in models}
    starting = [each for each in listed.values() if not _starts(each)]
    words = [_trains(each) for each in starting]
    counted = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
    table = [
        f"{len(listed)} models: {len(starting)} start ({counted}).",
        "",
        f"| {' | '.join(BY_NAME)} |",
        "|" + "---|" * len(BY_NAME),
        *(_named_row(models[name], result) for name, result in listed.items()),
    ]
    return HEAD.replace("MODELS_BY_NAME", "\n".join(table))


def _starts(result: FamilyResult) -> str:
    """Return why a published model does not start, "" if it does."""
    rollout = result.parts.get("rollout")
    if rollout is not None and rollout.verdict is Verdict.REJECTED:
        return result.facts["problem"] or f"vLLM: {rollout.message}"
    return result.facts["problem"]


def _trains(result: FamilyResult) -> str:
    """Return how the small network of a published model trains."""
    parts = {name: each.verdict for name, each in result.parts.items()}
    refused = {name for name, verdict in parts.items() if verdict is Verdict.REFUSED}
    is_padded = result.verdict is Verdict.PARTLY and refused == set(LAYOUTS)
    return "right, padded" if is_padded else TRAINS[result.verdict]


def _tried(model: PublishedModel) -> str:
    """Return how a published model was tried."""
    toy = "toy of the language model" if "text_config" in model.config else "toy"
    return f"pretrained weights and {toy}" if model.is_pretrained else toy


def _named_row(model: PublishedModel, result: FamilyResult) -> str:
    """Return the row of a published model."""
    problem = _starts(result)
    cells = [
        model.name,
        f"`{model.family}`",
        f"{result.num_params / 1e9:,.4g}B",
        f"no: {_shown(problem.split('. ')[0])}" if problem else "yes",
        _trains(result),
        *(result.facts[name] for name in PLANS),
        _tried(model),
    ]
    return f"| {' | '.join(cells)} |"


def _families(results: Mapping[str, FamilyResult]) -> str:
    """Return the table of families."""
    rows = [_row(results[family]) for family in sorted(results)]
    titles = ["family", *PARTS, "largest difference", "notes"]
    names = {"lora": "LoRA"}
    lines = [
        f"| {' | '.join(names.get(each, each) for each in titles)} |",
        "|" + "---|" * len(titles),
        *rows,
    ]
    head = f"\n## Families\n{_counts(results)}\n\n{_origins(results)}\n\n"
    return head + "\n".join(lines) + "\n"


def _origins(results: Mapping[str, FamilyResult]) -> str:
    """Return which code and libraries the rows come from; the most frequent ones come first."""
    families: dict[str, list[str]] = {}
    for family in sorted(results):
        result = results[family]
        libraries = ", ".join(f"{name} {version}" for name, version in result.libraries.items())
        code = f"commit {result.commit} with {libraries}" if result.commit else "an older commit"
        families.setdefault(code, []).append(f"`{family}`")
    origins = sorted(families.items(), key=lambda each: -len(each[1]))
    most = [f"The rows are from {code}." for code, _ in origins[:1]]
    rest = [f"From {code}: {', '.join(names)}." for code, names in origins[1:]]
    later: dict[str, int] = {}  # Number of rows by the commit of their layouts.
    for result in results.values():
        if result.layouts_commit:
            later[result.layouts_commit] = later.get(result.layouts_commit, 0) + 1
    layouts = [
        f"The columns {' and '.join(LAYOUTS)} of {num} rows are from commit {commit}."
        for commit, num in later.items()
    ]
    return "\n".join(most + rest + layouts)


def _counts(results: Mapping[str, FamilyResult]) -> str:
    """Return the numbers of parts by verdict as text."""
    verdicts = [each.verdict for each in results.values()]
    counted = ", ".join(
        f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in verdicts
    )
    num_bare = sum("rollout" not in each.parts for each in results.values())
    packed = [each for each in results.values() if "packed" in each.parts]
    num_packed = sum(each.parts["packed"].verdict is Verdict.RIGHT for each in packed)
    layouts = f" {num_packed} of them are packed." if packed else ""
    rest = f" {num_bare} of them were measured without an engine so far." if num_bare else ""
    return f"{len(results)} families: {counted}.{rest}{layouts}"


def _row(result: FamilyResult) -> str:
    """Return the row of a family."""
    cells = [f"`{result.family}`<br>{result.architecture}"]
    cells += [_cell(name, result.parts.get(name)) for name in PARTS]
    cells += [f"{result.gap:.0e}" if result.gap else "0", _notes(result)]
    return f"| {' | '.join(cells)} |"


def _cell(name: str, found: PartResult | None) -> str:
    """Return the cell of one part."""
    if found is None:
        return "-"
    is_padded = name in LAYOUTS and found.verdict is Verdict.REFUSED
    return "padded" if is_padded else CELLS[found.verdict]


def _notes(result: FamilyResult) -> str:
    """Return the messages of all parts that are not right, each once."""
    notes: dict[str, list[str]] = {}
    for name in PARTS:
        part = result.parts.get(name)
        if part is None or not part.message or (name == "sft" and not _is_note(part)):
            continue
        notes.setdefault(part.message, []).append(name)
    texts = [f"{', '.join(names)}: {_shown(text)}" for text, names in notes.items()]
    texts += [
        f"{name}: {part.gap:.2g} nats"
        for name, part in result.parts.items()
        if part.verdict in (Verdict.WRONG, Verdict.ROUNDED) and part.gap is not None
    ]
    return "<br>".join(texts)


def _is_note(found: PartResult) -> bool:
    return found.verdict is not Verdict.RIGHT


def _shown(text: str) -> str:
    """Return a text for a cell, shortened."""
    short = text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("*", "\\*")


def write_page(results: Mapping[str, FamilyResult], published: Mapping[str, FamilyResult]) -> None:
    """Write the page of these results."""
    (ROOT / PAGE).write_text(page_text(results, published), encoding="utf-8")
