"""Plays given items with the checkpoint at `model.path`, in an engine of this process."""

from collections.abc import Sequence

from transformers import AutoTokenizer

from actor.engine.engine import Completion, Engine
from actor.play.play import Patience, Player, Record, play_all
from actor.rollout.env_client import Environments, HubClient, HubSession
from actor.rollout.episode import Act, Render
from actor.rollout.render import Renderer
from common.config.run_config import RunConfig
from common.wire.planned import PlannedEpisode


async def play_with_engine(
    cfg: RunConfig,
    plans: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str | None,
    record: Record,
    patience: Patience,
) -> None:
    """Play all plans.

    Raises:
        EngineError: the engine did not start or failed.
        EnvError: the hub cannot be reached.
        LongstrideError: too many episodes failed.
    """
    renderer = Renderer(AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True))
    engine = await Engine.start(
        cfg.model, cfg.actor, end_of_turn_ids=renderer.end_of_turn_ids, seed=cfg.run.seed
    )
    engine.version = 0
    num_requests = 0

    def policy(plan: PlannedEpisode) -> tuple[Act, Render]:
        async def act(ids: list[int], _: HubSession) -> Completion:
            nonlocal num_requests
            num_requests += 1
            return await engine.generate(
                list(ids),
                request_id=f"{plan.episode_id}:{num_requests}",
                max_tokens=cfg.actor.max_turn_tokens,
                salt="play",
            )

        return act, renderer  # type: ignore[return-value]

    player = Player(
        policy=policy,
        max_concurrent=cfg.actor.max_concurrent,
        max_tokens=cfg.actor.max_model_len,
        turn_tokens=cfg.actor.max_turn_tokens,
        episode_timeout_s=cfg.actor.episode_timeout_s,
    )
    try:
        async with HubClient(hub_url, token=token, timeout_s=cfg.actor.env_timeout_s) as hub:
            await play_all(
                plans,
                environments=await Environments.of(hub, style=cfg.envhub.style),
                player=player,
                record=record,
                patience=patience,
            )
    finally:
        engine.shut_down()
