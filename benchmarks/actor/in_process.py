"""Plays episodes and environments in this process, without hub, with the engine of a peer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from actor.formats.tools import load_renderer
from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.episode import Act, EnvSession, Turn, run_episode
from actor.rollout.lockstep import Rounds
from actor.seeds import SamplingSeeds, environment_seed
from common.config.run_config import RunConfig
from common.errors import EnvError
from common.wire.messages import Lease, Trajectory

MAX_AT_ONCE = 128


class LocalSession:
    """One episode of an environment in this process."""

    def __init__(self, env: Any, item_id: str, seed: int, *, start_score: float = 0.0) -> None:
        self._env = env
        self.first_observation: str = env.reset(item_id, seed)
        read_state = getattr(env, "state_text", None)
        self.first_state: str = read_state() if read_state else ""
        self.start_score = start_score

    async def step(self, action: str) -> HubStepResult:
        return HubStepResult(**self._env.step(action).as_dict())

    async def hint(self) -> ExpertHint:
        """Return the information that a scripted policy may use."""
        valid = self._env.valid_actions()
        expert = self._env.expert_action()
        return ExpertHint(valid_actions=valid, expert_action=expert)

    async def close(self) -> None:
        self._env.close()


class InProcessPlayer:
    """Plays leases with an engine of the caller."""

    def __init__(self, cfg: RunConfig, specs: Mapping[str, Any], engine: Any) -> None:
        """Load the tokenizer of `model.path`.

        Args:
            specs: environment -> its catalogue entry (`envhub.env.EnvSpec`).
            engine: samples with `version` and `generate_together`, as an actor's engine.
        """
        self._renderer = load_renderer(cfg.model.path, cfg.actor.format)
        self._engine = engine
        self._cfg = cfg
        self._specs = specs

    def play(self, leases: Sequence[Lease]) -> list[Trajectory]:
        """Return the episodes of the leases, in their order.

        Raises: EnvError: an environment failed, so the episode is not a result of the policy.
        """
        played: list[Trajectory] = []
        for start in range(0, len(leases), MAX_AT_ONCE):
            played += asyncio.run(self._play(leases[start : start + MAX_AT_ONCE]))
        for trajectory in played:
            if trajectory.end_reason.is_infrastructure_failure:
                raise EnvError(
                    f"{trajectory.item_id}: {trajectory.end_reason.value}: {trajectory.error}"
                )
        return played

    async def _play(self, leases: Sequence[Lease]) -> list[Trajectory]:
        """Play the leased episodes in one round after another."""
        rounds = Rounds(
            self._engine, max_tokens=self._cfg.actor.max_turn_tokens, exclusive=asyncio.Lock()
        )
        for lease in leases:
            rounds.enter(lease.episode_id)
        return await asyncio.gather(*(self._play_one(lease, rounds) for lease in leases))

    async def _play_one(self, lease: Lease, rounds: Rounds) -> Trajectory:
        """Play one leased episode."""
        actor = self._cfg.actor
        spec = self._specs[lease.env]
        style = next(
            option for option in spec.instruction if option.value == self._cfg.envhub.style
        )

        async def open_session() -> EnvSession:
            env = spec.make(style)
            seed = environment_seed(lease)
            return LocalSession(env, lease.item_id, seed, start_score=spec.start_score)

        seeds = SamplingSeeds(lease)

        async def act(ids: list[int], _: EnvSession) -> Turn:
            return await rounds.act(lease.episode_id, list(ids), seed=seeds.next())

        play: Callable[..., Any] = partial(run_episode, lease, open_session=open_session)
        taken: Act = act
        try:
            return await play(
                act=taken,
                render=self._renderer.of(lease.env),
                instruction=spec.instruction.get(style, ""),
                acknowledgement=spec.acknowledgement.get(style, ""),
                max_tokens=actor.max_model_len,
                turn_tokens=actor.max_turn_tokens,
                actor="in-process",
                keeps_last=False,
                options=actor,
            )
        finally:
            rounds.leave(lease.episode_id)
