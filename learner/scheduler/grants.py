"""Which episodes an actor gets when it asks, and the opening of groups for it."""

from common.config import RunConfig, TrainMode
from common.messages import EpisodeKind, Lease, LeaseRequest, PolicyKind
from learner.scheduler.books import Books
from learner.scheduler.catalog import Catalogue
from learner.scheduler.evaluation import Phase
from learner.scheduler.gate import GateState, allowed_groups
from learner.scheduler.groups import Episode, Group, episode_id_of
from learner.scheduler.horizon import horizon_at
from learner.scheduler.members import Member
from learner.scheduler.sampling import Sampler

Taken = list[tuple[Group, Episode]]


class Grants:
    """Serves requests for work out of the queue, and fills the queue as far as the gate lets it."""

    def __init__(self, cfg: RunConfig, catalogue: Catalogue, books: Books) -> None:
        self._cfg = cfg
        self._catalogue = catalogue
        self._books = books
        self._sampler = Sampler(cfg.tasks, catalogue, seed=cfg.run.seed)
        self._is_sync = cfg.train.mode is TrainMode.SYNC
        self.max_ahead_steps = cfg.scheduler.max_ahead_steps  # the learner may ask for less

    def take(
        self, request: LeaseRequest, *, phase: Phase, version: int, generation: int
    ) -> tuple[Taken, str]:
        """Choose episodes: of the actor's own groups, of nobody's, of new ones, of others'.

        What evaluates, or trains in step, is only for engines that hold the latest version.

        Returns:
            (episodes taken off the queue, why there are no more).
        """
        is_behind = request.version < version

        def is_allowed(group: Group) -> bool:
            needs_latest = group.kind is EpisodeKind.EVAL or self._is_sync
            return not (is_behind and needs_latest and group.policy is PolicyKind.MODEL)

        actor, num = request.actor, max(0, request.num_free_slots)
        leases = self._books.leases
        taken = leases.take(actor, num, is_allowed=is_allowed)
        reason = ""
        if is_behind and (self._is_sync or phase.is_eval):
            reason = f"weights: the actor holds version {request.version}, {version} is needed"
        elif phase.is_eval:
            reason = f"{phase}: all its episodes are being played"
        else:
            while len(taken) < num and not reason:
                reason = self._open_groups(version, generation)
                taken += leases.take(actor, num - len(taken), is_allowed=is_allowed)
        if len(taken) < num:
            taken += leases.steal(actor, num - len(taken), is_allowed=is_allowed)
        return taken, reason

    def _open_groups(self, version: int, generation: int) -> str:
        """Open the next group, in sync mode the whole batch; return why not, "" if opened."""
        verdict = allowed_groups(self._cfg, self.gate_state(version))
        for _ in range(verdict.num_allowed if self._is_sync else min(1, verdict.num_allowed)):
            self._open_group(version, generation)
        return verdict.reason

    def gate_state(self, version: int) -> GateState:
        """What the gate sees now."""
        return GateState(
            version=version,
            num_open=self._books.table.num_open,
            num_ready=self._books.table.num_ready,
            num_filtered=self._books.num_filtered,
            max_ahead_steps=self.max_ahead_steps,
        )

    def _open_group(self, version: int, generation: int) -> None:
        number = self._books.next_number
        self._books.next_number += 1
        item = self._sampler.item(number)
        stamp = horizon_at(self._cfg.horizon, version)
        max_turns = self._catalogue.entry(item.env, item.subset).max_turns
        group_id = f"g{number:07d}" + (f".{generation}" if generation else "")
        episodes = [
            Episode(
                episode_id=episode_id_of(group_id, member),
                member=member,
                env=item.env,
                subset=item.subset,
                item_id=item.item_id,
                seed=self._sampler.member_seed(number, member),
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
