"""Plays the same episodes and environments in this process, without hub or vLLM."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from actor.formats.tools import load_renderer
from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.episode import Act, EnvSession, Turn, run_episode
from actor.rollout.lockstep import Rounds
from benchmarks.actor.torch_engine import TorchEngine
from common.config.learning import Advantage
from common.config.run_config import RunConfig
from common.errors import EnvError
from common.seeds import SamplingSeeds, environment_seed
from common.wire.messages import EpisodeKind, Lease, Trajectory

MAX_AT_ONCE = 128
PlainId = Callable[[str, str], Awaitable[str]]


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
        valid = self._env.valid_actions()
        expert = self._env.expert_action()
        return ExpertHint(valid_actions=valid, expert_action=expert)

    async def close(self) -> None:
        self._env.close()


class InProcessPlayer:
    """Plays leases with the most recently loaded weights."""

    def __init__(
        self,
        cfg: RunConfig,
        specs: Mapping[str, Any],
        engine: Any = None,
        plain: PlainId | None = None,
    ) -> None:
        """Load model and tokenizer of `model.path`.

        Args:
            specs: environment -> its catalogue entry (`envhub.env.EnvSpec`).
            plain: (environment, item id) -> the environment's own id of an item at a distance.
            engine: samples with `version` and `generate_together`, as `TorchEngine`; None: a new
                `TorchEngine`.
        """
        path = cfg.model.path
        self._renderer = load_renderer(path, cfg.actor.format)
        self._engine = engine or _make_engine(cfg, self._renderer.end_of_turn_ids)
        self._cfg = cfg
        self._specs = specs
        self._plain = plain
        self._has_critic = cfg.algorithm.advantage is Advantage.PPO

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Load other weights for all later episodes."""
        self._engine.load(weights, version=version)

    def play(self, leases: Sequence[Lease]) -> list[Trajectory]:
        """Return the episodes of the leases, in their order.

        Raises: EnvError: an environment failed, so the episode is not a result of the policy.
        """
        played: list[Trajectory] = []
        for start in range(0, len(leases), MAX_AT_ONCE):
            played += asyncio.run(self._play(leases[start : start + MAX_AT_ONCE]))
        for each in played:
            if each.end_reason.is_infrastructure_failure:
                raise EnvError(f"{each.item_id}: {each.end_reason.value}: {each.error}")
        return played

    async def _play(self, leases: Sequence[Lease]) -> list[Trajectory]:
        rounds = Rounds(
            self._engine,  # type: ignore[arg-type] - It has all attributes that `Rounds` uses.
            max_tokens=self._cfg.actor.max_turn_tokens,
            exclusive=asyncio.Lock(),
        )
        for lease in leases:
            rounds.enter(lease.episode_id)
        return await asyncio.gather(*(self._one(lease, rounds) for lease in leases))

    async def _one(self, lease: Lease, rounds: Rounds) -> Trajectory:
        actor = self._cfg.actor
        spec = self._specs[lease.env]
        style = next(each for each in spec.instruction if each.value == self._cfg.envhub.style)

        async def open_session() -> EnvSession:
            item_id = await self._plain(lease.env, lease.item_id) if self._plain else lease.item_id
            env = spec.make(style)
            seed = environment_seed(lease)
            return LocalSession(env, item_id, seed, start_score=spec.start_score)

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
                keeps_last=self._has_critic and lease.kind is EpisodeKind.TRAIN,
                options=actor,
            )
        finally:
            rounds.leave(lease.episode_id)


def _make_engine(cfg: RunConfig, end_ids: Sequence[int]) -> TorchEngine:
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model.path, dtype=torch.float32, local_files_only=True
    )
    return TorchEngine(model, end_ids, temperature=cfg.actor.temperature)
