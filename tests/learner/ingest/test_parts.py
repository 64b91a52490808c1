"""Laws of episodes that are trained in parts."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actor.delivery import ARRAYS
from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.errors import ConfigError
from common.segments import first_fresh_turn, part_of
from common.store.run_dir import RunDir
from common.wire.messages import EndReason, EpisodeOutcome, Outcome, Trajectory
from learner.ingest.buffer import Group, GroupAssembly, TrajectoryBuffer, oldest_version
from learner.ingest.journal_index import FROM_THE_START, JournalIndex
from learner.ingest.reports import ReportLog
from learner.journal.journal import JournalPosition, JournalWriter
from learner.recovery.resume import readopt, with_parts
from learner.recovery.step_log import LoggedStep, PartLog, PartName, StepLog, each_part
from tests.learner.builders import make_episode, so_far


def make_groups(*, size: int = 1, trains_early: bool = True, is_by_turn: bool = True):
    cfg = GroupsSection(size=size, per_step=1, min_size=1)
    return GroupAssembly(
        cfg,
        AlgorithmSection(),
        has_signal=lambda _: True,
        is_by_turn=is_by_turn,
        trains_early=trains_early,
    )


def take(
    groups: GroupAssembly, version: int, *, bound: int
) -> tuple[list[Group], list[EpisodeOutcome]]:
    taken, outcomes = groups.take(version, max_lag_steps=bound, in_order=False)
    groups.note_trained(taken)
    return taken, outcomes


def trained_turns(part: Trajectory) -> list[int]:
    return sorted(set(part.turn_ids[part.loss_mask].tolist()))


def test_stale_turns_become_context() -> None:
    groups = make_groups()
    whole = make_episode([3, 4, 5, 6])
    groups.add(whole)
    (group,), outcomes = take(groups, 7, bound=2)
    (part,) = group.members
    assert outcomes == []
    assert trained_turns(part) == [2, 3]
    assert oldest_version(part) == 5
    assert part.token_ids.tolist() == whole.token_ids.tolist()
    assert (part.logprobs[~part.loss_mask] == 0).all()
    assert group.names == ["g0000000/0@2"]
    assert group.outcomes(Outcome.TRAINED) == [
        EpisodeOutcome(
            episode_id="g0000000/0", outcome=Outcome.TRAINED, cause="", num_stale_tokens=4
        )
    ]
    assert group.outcomes(Outcome.STALE, "controller")[0].outcome is Outcome.STALE


def test_episode_without_a_fresh_turn_is_stale() -> None:
    groups = make_groups()
    groups.add(make_episode([3, 4]))
    taken, (outcome,) = take(groups, 9, bound=2)
    assert taken == []
    assert (outcome.outcome, outcome.cause, outcome.num_stale_tokens) == (Outcome.STALE, "lag", 0)


def test_a_part_is_trained_at_the_last_step_that_accepts_it() -> None:
    groups = make_groups()
    whole = make_episode([3, 4, 5, 6], name="g0000001")
    groups.add_part(so_far(whole, 2))
    for number, version in enumerate((4, 5, 6)):
        groups.add(make_episode([version], name=f"g000001{number}"))
        (other, *parts), _ = take(groups, version, bound=2)
        assert other.names == [f"g000001{number}/0"]
        assert [trained_turns(each.members[0]) for each in parts] == [[0, 1]] * (version == 5)
        assert all(each.outcomes(Outcome.TRAINED) == [] for each in parts)
    groups.add(whole)
    (group,), _ = take(groups, 7, bound=2)
    assert trained_turns(group.members[0]) == [2, 3]
    (outcome,) = group.outcomes(Outcome.TRAINED)
    assert outcome.num_stale_tokens == 0


def test_only_a_critic_trains_unfinished_episodes() -> None:
    groups = make_groups(trains_early=False)
    groups.add_part(so_far(make_episode([3, 4], name="g0000001"), 2))
    groups.add(make_episode([5]))
    taken, _ = take(groups, 5, bound=2)
    assert [group.names for group in taken] == [["g0000000/0"]]


def test_an_ended_member_of_an_open_group_is_trained_in_time() -> None:
    groups = make_groups(size=2)
    ended = make_episode([3, 3], name="g0000001")
    groups.add(ended)
    for member in range(2):
        groups.add(make_episode([5], member=member))
    taken, _ = take(groups, 5, bound=2)
    assert [trained_turns(each) for each in taken[1].members] == [[0, 1]]
    assert taken[1].members[0].end_reason is ended.end_reason
    groups.add(make_episode([6], name="g0000001", member=1))
    (group,), (outcome,) = take(groups, 6, bound=2)
    assert group.names == ["g0000001/1"]
    assert (outcome.episode_id, outcome.outcome) == ("g0000001/0", Outcome.TRAINED)
    assert outcome.num_stale_tokens == 0


def test_turns_of_a_group_that_waits_are_trained_in_time() -> None:
    groups = make_groups()
    for number, versions in enumerate(([5], [3, 4])):
        groups.add(make_episode(versions, name=f"g000000{number}"))
    (first, early), _ = take(groups, 5, bound=2)
    assert first.names == ["g0000000/0"]
    assert early.is_early
    assert trained_turns(early.members[0]) == [0, 1]
    taken, (outcome,) = take(groups, 6, bound=2)
    assert taken == []
    assert (outcome.outcome, outcome.num_stale_tokens) == (Outcome.TRAINED, 0)


def test_episode_that_began_anew_is_trained_from_its_first_turn() -> None:
    groups = make_groups()
    groups.add_part(so_far(make_episode([3, 3], name="g0000001"), 2))
    groups.add(make_episode([5]))
    assert len(take(groups, 5, bound=2)[0]) == 2
    groups.add(make_episode([6, 6], name="g0000001", seed=1))
    (group,), _ = take(groups, 6, bound=2)
    assert group.names == ["g0000001/0"]
    assert trained_turns(group.members[0]) == [0, 1]


def test_a_failure_after_a_trained_part_is_trained() -> None:
    groups = make_groups()
    whole = make_episode([3, 3, 6], name="g0000001")
    groups.add_part(so_far(whole, 2))
    groups.add(make_episode([5]))
    take(groups, 5, bound=2)
    (outcome,), _ = groups.add(replace(whole, end_reason=EndReason.ENV_ERROR))
    assert (outcome.outcome, outcome.num_stale_tokens) == (Outcome.TRAINED, 2)


def test_a_failure_without_tokens_is_trained_if_a_part_of_it_was() -> None:
    for is_trained in (False, True):
        groups = make_groups()
        whole = make_episode([3, 3, 6], name="g0000001")
        groups.add_part(so_far(whole, 2))
        groups.add(make_episode([5]))
        taken, _ = groups.take(5, max_lag_steps=2, in_order=False)
        if is_trained:
            groups.note_trained(taken)
        (outcome,), _ = groups.add(without_tokens(whole))
        expected = Outcome.TRAINED if is_trained else Outcome.FAILED
        assert (outcome.outcome, outcome.num_stale_tokens) == (expected, 0)


def without_tokens(whole: Trajectory) -> Trajectory:
    """Return the record of an episode that was too large for a message."""
    nothing = {name: getattr(whole, name)[:0] for name in ARRAYS}
    return replace(whole, end_reason=EndReason.TOO_LARGE, num_turns=0, **nothing)


def test_a_skipped_part_is_not_trained() -> None:
    groups = make_groups()
    whole = make_episode([3, 4], name="g0000001")
    groups.add_part(so_far(whole, 1))
    groups.add(make_episode([5]))
    groups.take(5, max_lag_steps=2, in_order=False)  # The controller skips the batch.
    groups.add(whole)
    (group,), _ = take(groups, 6, bound=2)
    assert trained_turns(group.members[0]) == [1]
    assert group.outcomes(Outcome.TRAINED)[0].num_stale_tokens == 2
    assert group.outcomes(Outcome.STALE, "controller")[0].outcome is Outcome.STALE


def play(
    seed: int, *, bound: int, is_by_turn: bool, trains_early: bool, longest: int
) -> tuple[Counter[tuple[str, int]], dict[str, EpisodeOutcome], list[Trajectory], list[list[str]]]:
    """Run 40 steps over random episodes that last up to `longest` versions, with groups of two.

    Returns: how often each token was trained, the outcomes, the episodes, the names of each step.
    """
    rng = random.Random(seed)
    groups = make_groups(size=2, is_by_turn=is_by_turn, trains_early=trains_early)
    trained = Counter[tuple[str, int]]()
    outcomes: dict[str, EpisodeOutcome] = {}
    episodes: list[Trajectory] = []
    running: list[tuple[Trajectory, int]] = []
    steps: list[list[str]] = []

    def note(decided: list[EpisodeOutcome]) -> None:
        for each in decided:
            assert each.episode_id not in outcomes
            outcomes[each.episode_id] = each

    for version in range(40):
        for member in range(2):
            spans = sorted(rng.choices(range(version, version + rng.randint(1, longest)), k=6))
            whole = make_episode(
                spans, name=f"g{version:07d}", member=member, seed=1000 * version + member
            )
            running.append((whole, spans[-1]))
            episodes.append(whole)
        for whole, end in list(running):
            if end == version:
                running.remove((whole, end))
                note(groups.add(whole)[0])
            elif rng.random() < 0.8:
                num_turns = int((whole.versions[whole.loss_mask] <= version).sum()) // 2
                if num_turns:
                    groups.add_part(so_far(whole, num_turns))
        taken, dropped = take(groups, version, bound=bound)
        note(dropped)
        steps.append([name for group in taken for name in group.names])
        for group in taken:
            note(group.outcomes(Outcome.TRAINED))
            for part in group.members:
                assert version - oldest_version(part) <= bound
                places = np.flatnonzero(part.loss_mask).tolist()
                trained.update((part.episode_id, place) for place in places)
    return trained, outcomes, episodes, steps


@pytest.mark.parametrize("trains_early", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_each_token_is_trained_or_stale_once(seed: int, trains_early: bool) -> None:
    trained, outcomes, episodes, _ = play(
        seed, bound=3, is_by_turn=True, trains_early=trains_early, longest=9
    )
    assert set(trained.values()) == {1}
    num_partial = 0
    for whole in episodes:
        outcome = outcomes.get(whole.episode_id)
        if outcome is None:
            continue
        num_sampled = int(whole.loss_mask.sum())
        num_trained = sum(name == whole.episode_id for name, _ in trained)
        num_stale = outcome.num_stale_tokens
        if outcome.outcome is Outcome.STALE:
            num_stale = num_sampled
        assert num_trained + num_stale == num_sampled
        num_partial += 0 < num_trained < num_sampled
    assert len(outcomes) > 40
    assert num_partial > 0


@pytest.mark.parametrize("seed", range(3))
def test_parts_change_nothing_if_no_episode_exceeds_the_bound(seed: int) -> None:
    limits = {"bound": 20, "longest": 9}
    off = play(seed, is_by_turn=False, trains_early=False, **limits)
    turns = play(seed, is_by_turn=True, trains_early=True, **limits)
    assert off[3] == turns[3]
    assert off[0] == turns[0]
    assert off[1] == turns[1]


@pytest.mark.parametrize("seed", range(3))
def test_early_parts_leave_fewer_tokens_stale(seed: int) -> None:
    off, late, early = (
        len(play(seed, bound=3, is_by_turn=by_turn, trains_early=is_early, longest=9)[0])
        for by_turn, is_early in ((False, False), (True, False), (True, True))
    )
    assert off < late < early


def test_part_names_are_read_as_written() -> None:
    whole = make_episode([3, 4, 5], member=2)
    early = part_of(so_far(whole, 2), 1)
    for part, is_early in ((whole, False), (part_of(whole, 1), False), (early, True)):
        name = PartName.of(part, is_early=is_early)
        assert PartName.parse(name.text) == name
        assert name.episode_id == "g0000000/2"
    name = PartName.of(early, is_early=True)
    assert name.is_in(whole)
    assert not name.is_in(so_far(whole, 1))
    assert not name.is_in(make_episode([3, 4, 5], member=2, seed=1))
    assert name.num_tokens == 2


def test_tokens_that_the_end_adds_to_a_trained_turn_are_stale() -> None:
    groups = make_groups()
    whole = make_episode([3, 3, 6], name="g0000001")
    groups.add_part(so_far(whole, 2))
    groups.add(make_episode([5]))
    take(groups, 5, bound=2)
    # The last tokens are the call of a branch: no third turn followed.
    turns = np.minimum(whole.turn_ids, 1)
    groups.add(replace(whole, turn_ids=turns, num_turns=2))
    groups.add(make_episode([6], name="g0000002"))
    _, (outcome,) = take(groups, 6, bound=2)
    assert (outcome.episode_id, outcome.num_stale_tokens) == ("g0000001/0", 2)


def test_a_step_after_a_skip_trains_no_part_early() -> None:
    groups = make_groups()
    whole = make_episode([3, 4, 5], name="g0000001")
    groups.add_part(so_far(whole, 3))
    groups.add(make_episode([5]))
    taken, _ = groups.take(5, max_lag_steps=0, in_order=False, is_narrow=True)
    assert [group.names for group in taken] == [["g0000000/0"]]
    groups.add(whole)
    (group,), _ = take(groups, 6, bound=3)
    assert trained_turns(group.members[0]) == [0, 1, 2]


def test_a_failure_while_its_part_is_trained_is_trained() -> None:
    groups = make_groups()
    whole = make_episode([3, 3, 6], name="g0000001")
    groups.add_part(so_far(whole, 2))
    groups.add(make_episode([5]))
    taken, _ = groups.take(5, max_lag_steps=2, in_order=False)
    (early,), _ = groups.add(replace(whole, end_reason=EndReason.ENV_ERROR))
    assert early.outcome is Outcome.FAILED  # A crash or the controller may end the step.
    (outcome,) = groups.note_trained(taken)
    assert (outcome.outcome, outcome.num_stale_tokens) == (Outcome.TRAINED, 2)
    assert groups.note_trained([]) == []


def test_parts_of_settled_episodes_are_not_trained() -> None:
    groups = make_groups(size=2)
    index = JournalIndex(end=JournalPosition(), closed_below=2)
    buffer = TrajectoryBuffer(groups, index, ReportLog(), version=5)
    groups.give_up("g0000002", 0)
    for name in ("g0000001", "g0000002"):  # Closed; given up.
        buffer.add_part(so_far(make_episode([3, 3], name=name), 1))
    for member in range(2):
        groups.add(make_episode([5], name="g0000003", member=member))
    taken, _ = take(groups, 5, bound=2)
    assert [group.group_id for group in taken] == ["g0000003"]


def test_turns_of_two_versions_are_as_old_as_their_oldest_token() -> None:
    whole = make_episode([3, 4, 5])
    versions = whole.versions.copy()
    versions[5] = 3  # A token of the second turn.
    assert first_fresh_turn(replace(whole, versions=versions), least_version=4) == 2
    assert first_fresh_turn(whole, least_version=4) == 1
    assert first_fresh_turn(whole, least_version=3) == 0


def test_prompt_after_a_part_stays_for_the_critic() -> None:
    whole = make_episode([3, 4])
    starts = np.array([0, 4, 6], np.int32)  # The last segment has no sampled token.
    mask = whole.loss_mask.copy()
    mask[6:] = False
    segments = replace(
        whole, segment_starts=starts, loss_mask=mask, versions=np.where(mask, whole.versions, -1)
    )
    part = part_of(segments, 1)
    assert part.token_ids.tolist() == whole.token_ids[4:].tolist()
    assert part.segment_starts.tolist() == [0, 2]
    assert part.loss_mask.tolist() == [True, True, False]


def test_parts_of_a_step_are_restored_bit_for_bit(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    whole = make_episode([3, 4, 5, 6])
    early = part_of(so_far(whole, 2), 1)
    name = PartName.of(early, is_early=True).text
    log = PartLog(run_dir.parts)
    log.append([early])
    log.append([])
    log.close()
    run_dir.parts.write_bytes(run_dir.parts.read_bytes() + b'{"part":"torn')
    PartLog(run_dir.parts).close()
    logged = with_parts({whole.episode_id: whole}, [name, "g0000000/0@3"], run_dir)
    assert logged.keys() == {name, "g0000000/0@3"}
    for part, expected in ((logged[name], early), (logged["g0000000/0@3"], part_of(whole, 3))):
        for column in ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids"):
            assert np.array_equal(getattr(part, column), getattr(expected, column))
        assert part.num_shared_turns == expected.num_shared_turns
    assert logged[name].end_reason is EndReason.UNFINISHED
    run_dir.parts.write_text(f'{{"part":"{name}","record":"?"}}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        dict(each_part(run_dir.parts, [name]))


def test_log_of_parts_is_pruned_with_the_step_log(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    parts = [so_far(make_episode([3], name=f"g000000{n}", seed=n), 1) for n in range(3)]
    names = [PartName.of(each, is_early=True).text for each in parts]
    log = PartLog(run_dir.parts, prune_from_bytes=1)
    log.append(parts)
    steps = StepLog(run_dir.steps)
    steps.append(LoggedStep(version=1, groups=[[names[1]]], outcomes=[]))
    steps.close()
    log.prune(run_dir.steps)
    log.append(parts[2:])
    log.close()
    assert dict(each_part(run_dir.parts, names)).keys() == {names[1], names[2]}
    assert names[0].encode() not in run_dir.parts.read_bytes()


def test_step_log_keeps_lines_with_parts_of_open_groups(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    early = PartName.of(so_far(make_episode([3], name="g0000007"), 1), is_early=True).text
    done = EpisodeOutcome(
        episode_id="g0000001/0", outcome=Outcome.TRAINED, cause="", num_stale_tokens=5
    )
    log.append(LoggedStep(version=1, groups=[["g0000001/0"], [early]], outcomes=[done]))
    assert log.first_needed(version=1, closed_below=7) == 0
    assert log.first_needed(version=1, closed_below=8) > 0
    log.close()


def test_restarted_learner_trains_no_part_twice() -> None:
    whole = make_episode([3, 4, 5, 6], name="g0000001")
    before = make_groups()
    before.add_part(so_far(whole, 2))
    before.add(make_episode([5]))
    taken, _ = take(before, 5, bound=2)
    after = make_groups()
    after.adopt_parts([group.names for group in taken])
    after.add_part(so_far(whole, 3))
    after.add(make_episode([6], name="g0000002"))
    (_, *parts), _ = take(after, 6, bound=2)
    assert parts == []  # The turns of version 5 may wait one more step.
    after.add(whole)
    (group,), _ = take(after, 7, bound=2)
    assert trained_turns(group.members[0]) == [2, 3]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_resumed_run_reads_its_trained_parts(tmp_path: Path, is_skipped: bool) -> None:
    run_dir = RunDir(root=tmp_path)
    whole = make_episode([3, 4, 5, 6], name="g0000001")
    early = PartName.of(so_far(whole, 2), is_early=True).text
    journal = JournalWriter(run_dir.journal)
    journal.append(whole)
    journal.sync()
    journal.close()
    steps = StepLog(run_dir.steps)
    steps.append(LoggedStep(version=5, groups=[[early]], outcomes=[], is_skipped=is_skipped))
    steps.close()
    index = JournalIndex(end=journal.position)
    buffer = TrajectoryBuffer(make_groups(), index, ReportLog(), version=5)
    readopt(buffer, run_dir, FROM_THE_START)
    (group,), _ = buffer.next_batch(6, max_lag_steps=2, in_order=False, timeout_s=1.0)
    assert trained_turns(group.members[0]) == ([1, 2, 3] if is_skipped else [2, 3])
