"""Plays given episodes with a checkpoint, in an engine of this process."""

from dataclasses import replace
from itertools import count

from actor.agents.agents import agents_of
from actor.engine.engine import Engine
from actor.formats.renderer import Renderer
from actor.formats.tools import load_renderer
from actor.rollout.episode import Act, EnvSession, Render, Turn
from actor.seats.seats import Seats
from actor.seeds import SamplingSeeds
from common.config.actor import ActorSection
from common.config.model import ModelSection
from tools.evaluate.planned import PlannedEpisode
from tools.evaluate.play import EpisodePlayer, PlayJob, lease_of, play


async def play_with_engine(
    job: PlayJob, model: ModelSection, actor: ActorSection, *, seed: int
) -> None:
    """Play the job. Raises: EngineError: the engine did not start or failed; and as `play`."""
    renderer = load_renderer(model.path, actor.format)
    renderer.check_room(actor)
    engine = await Engine.start(
        model, actor, end_of_turn_ids=renderer.end_of_turn_ids, seed=seed, is_repeatable=True
    )
    engine.version = 0
    agents = agents_of(actor, actor="play", renderer=renderer)
    seats = Seats(actor)
    player = replace(player_of(engine, renderer, actor), agents=agents, seats=seats)
    try:
        await play(job, player)
    finally:
        if agents is not None:
            await agents.close()
        await seats.close()
        engine.shut_down()


def player_of(engine: Engine, renderer: Renderer, actor: ActorSection) -> EpisodePlayer:
    """Return a player that samples from an engine in the built-in loop."""
    numbers = count(1)

    def policy(plan: PlannedEpisode) -> tuple[Act, Render]:
        """Return the function that samples the turns of an episode, and the renderer."""
        seeds = SamplingSeeds(lease_of(plan, attempt=0, deadline_s=0.0))

        async def act(ids: list[int], _: EnvSession) -> Turn:
            return await engine.generate(
                list(ids),
                request_id=f"{plan.episode_id}:{next(numbers)}",
                max_tokens=actor.max_turn_tokens,
                salt="play",
                seed=seeds.next(),
            )

        return act, renderer

    return EpisodePlayer(
        policy=policy,
        max_concurrent=actor.max_concurrent,
        max_tokens=actor.max_model_len,
        turn_tokens=actor.max_turn_tokens,
        options=actor,
    )
