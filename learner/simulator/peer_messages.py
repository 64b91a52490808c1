"""Messages of simulated roles to a scheduler; what they have nothing to say about is zero."""

from common.wire.messages import EndReason, EpisodeSeen, Heartbeat, Hello, Lease


def hello(role: str, name: str, *, incarnation: str = "life-1", version: int = 0) -> Hello:
    """Return the first words of a role."""
    return Hello(role=role, name=name, incarnation=incarnation, version=version)


def heartbeat(
    role: str, name: str, *, version: int, running: list[str], num_slots: int = 0
) -> Heartbeat:
    """Return a sign of life."""
    return Heartbeat(
        role=role,
        name=name,
        version=version,
        running=running,
        num_slots=num_slots,
        tokens_per_s=0.0,
        waiting_for="",
        rss_bytes=0,
    )


def seen(
    lease: Lease,
    *,
    reward: float,
    is_success: bool,
    end_reason: EndReason,
    num_turns: int,
    wall_s: float,
) -> EpisodeSeen:
    """Return what a learner says of an episode that arrived."""
    return EpisodeSeen(
        episode_id=lease.episode_id,
        reward=reward,
        is_success=is_success,
        end_reason=end_reason,
        num_turns=num_turns,
        wall_s=wall_s,
    )
