"""Which episodes an actor gets when it asks, and the opening of groups for it."""

from common.config.run_config import RunConfig, TrainMode, published_version
from common.wire.messages import EpisodeKind, Lease, LeaseRequest, PolicyKind
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.sampling import member_seed
from learner.scheduler.dispatch.gate import GateState, allowed_groups
from learner.scheduler.dispatch.limits import Limits
from learner.scheduler.episodes.lifecycle import Books
from learner.scheduler.episodes.table import Episode, Group, episode_id_of
from learner.scheduler.evaluation.phases import Phase
from learner.scheduler.members.members import Member, Members

Taken = list[tuple[Group, Episode]]
UNLIMITED = 1 << 30


class Grants:
    """Serves requests for work out of the queue, and fills the queue as far as the gate lets it."""

    def __init__(self, cfg: RunConfig, catalogue: Catalogue, books: Books) -> None:
        self._cfg = cfg
        self._catalogue = catalogue
        self._books = books
        self._is_sync = cfg.train.mode is TrainMode.SYNC
        self.limits = Limits(cfg)

    def serve(
        self, request: LeaseRequest, members: Members, *, phase: Phase, version: int, now: float
    ) -> tuple[Taken, str]:
        """Choose what an actor gets by what it asks for, by its speed and by who waits for work.

        Example: the gate is closed. fast holds 60 episodes, late asks and is refused. Until late
        holds as many, or has all that it can play, fast is not given new groups.

        Returns:
            (episodes taken off the queue, why there are no more; "" if it has all it asked for).
        """
        name, num = request.actor, max(0, request.num_free_slots)
        member = members.by_name[name]
        num_allowed = min(num, self._num_by_speed(member, members))
        num_fresh = min(num_allowed, self._num_in_turn(name, members, now))
        taken, reason = self.take(
            request, num_allowed, num_fresh, phase=phase, version=version, now=now
        )
        if len(taken) == num:
            members.feed(name)
            return taken, ""
        if len(taken) == num_allowed:
            members.feed(name)
            return taken, f"speed: {name} has as much as it finishes before it is stale"
        if not phase.is_eval and request.version >= published_version(self._cfg, version):
            members.refuse(name, now, has_some=bool(taken))
        return taken, reason or "turn: an actor with fewer episodes is served first"

    def _num_by_speed(self, member: Member, members: Members) -> int:
        """Return how many more episodes an actor may get. One that is alone may have all."""
        limit = self.limits.lease_limit(self._books.pace, member)
        if limit is None or not members.has_other_actor(member):
            return UNLIMITED
        return max(0, limit - self._books.leases.num_leased_to(member.name))

    def _num_in_turn(self, name: str, members: Members, now: float) -> int:
        """Return how many episodes an actor may get beyond those of open groups."""
        rival = members.hungriest(name, now)
        if self._is_sync or not rival:
            return UNLIMITED
        leases = self._books.leases
        lead = leases.num_leased_to(name) - leases.num_leased_to(rival)
        return max(0, self._cfg.groups.size - lead)

    def take(
        self,
        request: LeaseRequest,
        num: int,
        num_fresh: int,
        *,
        phase: Phase,
        version: int,
        now: float,
    ) -> tuple[Taken, str]:
        """Choose episodes: of the actor's own groups, of nobody's, of new ones, of others'.

        What evaluates, or trains in step, is only for engines that hold the newest version sent.

        Args:
            num: episodes at most.
            num_fresh: groups are opened up to so many episodes.
            now: core's clock.

        Returns:
            (episodes taken off the queue, why there are no more).
        """
        needed = published_version(self._cfg, version)
        is_behind = request.version < needed

        def is_allowed(group: Group) -> bool:
            needs_latest = group.kind is EpisodeKind.EVAL or self._is_sync
            return not (is_behind and needs_latest and group.policy is PolicyKind.MODEL)

        actor = request.actor
        leases = self._books.leases
        taken = leases.take(actor, num, is_allowed=is_allowed)
        reason = ""
        if is_behind and (self._is_sync or phase.is_eval):
            reason = f"weights: the actor holds version {request.version}, {needed} is needed"
        elif phase.is_eval:
            reason = f"{phase}: all its episodes are being played"
        else:
            while len(taken) < num_fresh and not reason:
                reason = self._open_groups(version, now)
                taken += leases.take(actor, num - len(taken), is_allowed=is_allowed)
        if len(taken) < num:
            taken += leases.steal(actor, num - len(taken), is_allowed=is_allowed)
        return taken, reason

    def _open_groups(self, version: int, now: float) -> str:
        """Open the next group, in sync mode the whole batch; return why not, "" if opened."""
        verdict = allowed_groups(self._cfg, self.gate_state(version))
        for _ in range(verdict.num_allowed if self._is_sync else min(1, verdict.num_allowed)):
            self._open_group(version, now)
        return verdict.reason

    def gate_state(self, version: int) -> GateState:
        """What the gate sees now."""
        return GateState(
            version=version,
            num_open=self._books.table.num_open,
            num_ready=self._books.table.num_ready,
            num_filtered=self._books.num_filtered,
            max_ahead_steps=self.limits.max_ahead_steps,
            needed_ahead_steps=self.limits.needed_ahead_steps,
        )

    def _open_group(self, version: int, now: float) -> None:
        number = self._books.next_number
        self._books.next_number += 1
        item = self._books.curriculum.item(number)
        stamp = self._books.curriculum.stamp(item.env, version, subset=item.subset)
        max_turns = self._catalogue.entry(item.env, item.subset).max_turns
        group_id = f"g{number:07d}"
        episodes = [
            Episode(
                episode_id=episode_id_of(group_id, member),
                member=member,
                env=item.env,
                subset=item.subset,
                item_id=item.item_id,
                seed=member_seed(self._cfg.run.seed, number, member),
                horizon=min(stamp.horizon, max_turns),
            )
            for member in range(self._cfg.groups.size)
        ]
        group = Group(
            group_id=group_id,
            number=number,
            kind=EpisodeKind.TRAIN,
            policy=PolicyKind.MODEL,
            horizon_stage=stamp.stage,
            opened_at_version=version,
            episodes=episodes,
            opened_at=now,
        )
        self._books.open(group)

    def grant(self, group: Group, episode: Episode, *, member: Member, now: float) -> Lease:
        """Book the lease of a taken episode and return it."""
        self._books.grant(
            group, episode, actor=member.name, incarnation=member.incarnation, now=now
        )
        return Lease(
            episode_id=episode.episode_id,
            group_id=group.group_id,
            member=episode.member,
            attempt=episode.attempt,
            kind=group.kind,
            policy=group.policy,
            env=episode.env,
            item_id=episode.item_id,
            seed=episode.seed,
            horizon=episode.horizon,
            horizon_stage=group.horizon_stage,
            opened_at_version=group.opened_at_version,
            deadline_s=self._cfg.actor.episode_timeout_s,
        )
