"""The keys of agents. A key gives access to one episode, until the episode ends."""

import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.responses import Response

from actor.agents.episode import AgentEpisode
from actor.agents.http import AgentRequest
from actor.agents.repeats import Repeats
from actor.api.requests import ApiError

logger = logging.getLogger(__name__)

NUM_ENDED = 10_000  # Number of ended episodes whose keys are remembered.
LOG_EVERY_S = 10.0  # Seconds between two log lines about refused keys for the same reason.


@dataclass(slots=True, kw_only=True)
class Access:
    """The episode of a key."""

    episode: AgentEpisode
    repeats: Repeats = field(default_factory=Repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """An ended episode, with the answer that ended it."""

    episode_id: str
    repeats: Repeats


class EpisodeKeys:
    """The keys of the running episodes. Every refused key is logged with its reason.

    Keys are found by their digests, so the duration of a search depends on no secret.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a store without keys; `clock` limits the log lines."""
        self._running: dict[bytes, Access] = {}
        self._ended: OrderedDict[bytes, _Ended] = OrderedDict()
        self._refusals = RefusalLog(clock)

    def add(self, episode: AgentEpisode) -> None:
        """Accept the key of an episode."""
        self._running[digest_of(episode.key)] = Access(episode=episode)

    def remove(self, episode: AgentEpisode) -> None:
        """Refuse the key from now on. A lost last answer can still be repeated."""
        mark = digest_of(episode.key)
        access = self._running.pop(mark)
        access.repeats.close()
        self._ended[mark] = _Ended(episode_id=episode.lease.episode_id, repeats=access.repeats)
        while len(self._ended) > NUM_ENDED:
            self._ended.popitem(last=False)

    def find(self, key: str) -> AgentEpisode | None:
        """Return the running episode of a key, None if there is none."""
        access = self._running.get(digest_of(key))
        return None if access is None else access.episode

    def has_ended(self, key: str) -> bool:
        """Return whether a key belongs to an episode that has ended."""
        return digest_of(key) in self._ended

    def access(self, request: AgentRequest) -> Access:
        """Return the episode of a request.

        Raises: ApiError: the key is unknown, its episode has ended, or the URL names another one.
        """
        mark = digest_of(request.key)
        access = self._running.get(mark)
        if access is None:
            ended = self._ended.get(mark)
            if ended is None:
                self._refusals.add(request, "unknown key")
                raise _invalid("this API key belongs to no episode")
            self._refusals.add(request, "expired key", episode=ended.episode_id)
            raise ApiError(401, "episode_ended", "the episode of this API key has ended")
        episode_id = access.episode.lease.episode_id
        if request.episode and request.episode != url_name(episode_id):
            self._refusals.add(request, "key of another episode", episode=episode_id)
            raise _invalid(f"this API key does not belong to the episode {request.episode:.80}")
        if not hmac.compare_digest(access.episode.key.encode(), request.key.encode()):
            raise _invalid("this API key belongs to no episode")
        return access

    def last_answer(self, request: AgentRequest) -> Response | None:
        """Return the answer that ended an episode to a repeated request, else None."""
        ended = self._ended.get(digest_of(request.key))
        return None if ended is None else ended.repeats.known(request)

    def refuse_taker(self, request: AgentRequest) -> ApiError:
        """Return the error for an unknown address of episodes, and log it."""
        self._refusals.add(request, "unknown address of episodes")
        return _invalid("this URL belongs to no running agent process")


class RefusalLog:
    """Logs refused keys, each reason at most once in `LOG_EVERY_S`. No line has a key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, request: AgentRequest, reason: str, *, episode: str = "") -> None:
        """Count a refused request, and log it unless the reason was logged recently.

        Args:
            episode: episode that the key belongs to; "": none.
        """
        self._counts[reason] = self._counts.get(reason, 0) + 1
        now = self._clock()
        if now - self._logged_at.get(reason, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged_at[reason] = now
        logger.warning(
            "refused a request of an agent status=401 reason=%s request=%s %s peer=%s"
            " key_of_episode=%s url_of_episode=%s num_refused=%d",
            reason,
            request.method,
            request.path if request.path.startswith(("/v1/", "/env")) else "other",
            request.peer,
            episode or "none",
            request.episode or "none",
            self._counts[reason],
        )


def url_name(episode_id: str) -> str:
    """Return the name of an episode in URLs. It has no slash, which proxies would decode."""
    return quote(episode_id.replace("/", "."), safe="")


def digest_of(key: str) -> bytes:
    """Return the digest by which a key is found."""
    return hashlib.sha256(key.encode()).digest()


def _invalid(text: str) -> ApiError:
    return ApiError(401, "invalid_api_key", text)
