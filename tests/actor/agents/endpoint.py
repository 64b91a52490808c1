"""One episode behind the agents' endpoint, with tools in its template and a policy by heart."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import aiohttp

from actor.agents.episode import AgentEpisode
from actor.agents.server import AgentServer
from actor.formats.renderer import Renderer
from actor.rollout.context import History, Room, Tape
from actor.rollout.episode import EnvSession, EpisodeState, OnTokens, Turn
from common.config.actor import AgentServerOptions
from common.wire.messages import Lease
from tests.actor.agents.test_tool_calls import TOKENIZER
from tests.actor.rollout.test_episode import LEASE, Count, go_on

RENDERER = Renderer(TOKENIZER)
MAX_TOKENS, TURN_TOKENS = 4000, 200


@dataclass(slots=True)
class ByHeart:
    """A policy that answers its texts in order and repeats the last; each turn ends normally."""

    texts: Sequence[str | Exception]
    given: list[list[int]] = field(default_factory=list)
    renderer: Renderer = RENDERER

    async def act(
        self, ids: list[int], _: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        turn = self.turn(ids)
        if on_tokens is not None:
            for at in range(len(turn.token_ids) - 1):
                await self.before_token(at)
                on_tokens(part_of(turn, at, at + 1))
        return turn

    def turn(self, ids: list[int]) -> Turn:
        """Return the next answer."""
        text = self.texts[min(len(self.given), len(self.texts) - 1)]
        self.given.append(list(ids))
        if isinstance(text, Exception):
            raise text
        said = [*self.renderer.completion(text), self.renderer.end_of_turn_ids[0]]
        return Turn(said, [-0.5] * len(said), [3] * len(said), num_prompt=len(ids))

    async def before_token(self, number: int) -> None:
        """Wait before a token of a stream."""
        await asyncio.sleep(0)


def part_of(turn: Turn, start: int, end: int) -> Turn:
    """Return some tokens of a turn."""
    return replace(
        turn,
        token_ids=turn.token_ids[start:end],
        logprobs=turn.logprobs[start:end],
        versions=turn.versions[start:end],
    )


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """The client of a test and the captured episode."""

    server: AgentServer
    episode: AgentEpisode
    play: EpisodeState
    http: aiohttp.ClientSession

    @property
    def tape(self) -> Tape:
        """The captured tokens."""
        return self.episode.tape()

    @property
    def sampled(self) -> list[int]:
        """The tokens that are trained on."""
        return list(compress(self.tape.token_ids, self.tape.loss_mask))

    async def post(
        self, path: str, body: object, *, key: str | None = None, header: str = "x-api-key"
    ) -> tuple[int, Any]:
        """Return status and answer, of a stream its text."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {header: self.episode.key if key is None else key}
        async with self.http.post(
            self.server.url + path, data=io.BytesIO(raw), headers=headers
        ) as reply:
            is_stream = reply.content_type == "text/event-stream"
            return reply.status, await (reply.text() if is_stream else reply.json())


def new_episode(
    policy: ByHeart,
    renderer: Renderer = RENDERER,
    *,
    session: Count | None = None,
    lease: Lease = LEASE,
    task: tuple[str, str] = ("", ""),
    room: tuple[int, int] = (MAX_TOKENS, TURN_TOKENS),
) -> tuple[AgentEpisode, EpisodeState]:
    """Return an episode without requests, and its record."""
    limits = Room(max_tokens=room[0], turn_tokens=room[1])
    play = EpisodeState(keeps_last=False, history=History(renderer, limits))
    episode = AgentEpisode(
        lease,
        session=session or Count([go_on()]),
        act=policy.act,
        play=play,
        renderer=renderer,
        room=room,
        task=task,
    )
    return episode, play


@asynccontextmanager
async def endpoint(
    policy: ByHeart,
    renderer: Renderer | None = None,
    *,
    session: Count | None = None,
    lease: Lease = LEASE,
    task: tuple[str, str] = ("", ""),
    options: AgentServerOptions | None = None,
) -> AsyncIterator[Endpoint]:
    """Serve one episode; the renderer is the policy's unless another is given."""
    server = AgentServer(options)
    await server.start()
    episode, play = new_episode(
        policy, renderer or policy.renderer, session=session, lease=lease, task=task
    )
    try:
        async with aiohttp.ClientSession() as http:
            with server.serving(episode):
                yield Endpoint(server=server, episode=episode, play=play, http=http)
    finally:
        await server.close()
        if not episode.failed.done():
            episode.failed.cancel()
