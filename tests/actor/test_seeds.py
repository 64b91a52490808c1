"""Laws of seeds: each draw has its own, the same wherever the episode is played."""

from dataclasses import replace

from actor.seeds import SamplingSeeds, draw_seed, engine_seed, environment_seed
from common.wire.messages import EpisodeKind
from scheduler.curriculum.sampling import member_seed
from tests.actor.rollout.playing import LEASE


def of_member(member: int, **changes: object) -> SamplingSeeds:
    seed = member_seed(0, 12, member)
    lease = replace(LEASE, episode_id=f"g0000012/{member}", member=member, seed=seed)
    return SamplingSeeds(replace(lease, **changes))  # type: ignore[arg-type]


def test_seed_equals_the_digest_of_words() -> None:
    # The first 8 bytes of BLAKE2b of b"a/1", of digest size 8, shifted to so many bits.
    whole = 0xB27F9D5BFD0616C0
    assert draw_seed("a", 1) == whole >> 1
    assert draw_seed("a", 1, bits=31) == whole >> 33


def test_group_members_and_turns_draw_differently() -> None:
    members = [of_member(member) for member in range(64)]
    found = {seeds.next() for seeds in members for _ in range(8)}
    assert len(found) == 512
    assert all(0 <= each < 2**63 for each in found)


def test_member_draws_equal_across_actors_and_attempts() -> None:
    first, again = of_member(3, attempt=0, lease_mac="a"), of_member(3, attempt=2, lease_mac="b")
    assert [first.next() for _ in range(5)] == [again.next() for _ in range(5)]


def test_seed_of_the_lease_reaches_every_draw() -> None:
    assert of_member(3).next() != of_member(3, seed=1).next()


def test_evaluation_draws_equal_before_and_after_training() -> None:
    before, after, other = (
        of_member(3, kind=EpisodeKind.EVAL, episode_id=f"{name}/3", seed=seed)
        for name, seed in (("eval-before-model", 5), ("eval-after-model", 5), ("x", 6))
    )
    assert before.next() == after.next() != other.next()


def test_group_members_share_the_environment_seed() -> None:
    group = [replace(LEASE, member=n, episode_id=f"g/{n}", seed=n) for n in range(4)]
    assert len({environment_seed(each) for each in group}) == 1
    assert environment_seed(group[0]) != environment_seed(replace(LEASE, group_id="h"))
    assert 0 <= environment_seed(group[0]) < 2**31


def test_held_out_samples_use_different_environment_seeds() -> None:
    held_out = replace(LEASE, kind=EpisodeKind.EVAL, seed=11)
    assert environment_seed(held_out) == 11
    assert environment_seed(replace(held_out, seed=12)) == 12


def test_engines_of_different_starts_share_no_seed() -> None:
    starts = [(name, life) for name in ("actor-0", "actor-1", "two") for life in ("a", "b", "c")]
    found = {engine_seed(7, name=name, incarnation=life) for name, life in starts}
    assert len(found) == 9
    assert engine_seed(7, name="two", incarnation="a") == engine_seed(
        7, name="two", incarnation="a"
    )
