"""Base class of episodes on external servers, whose state is known only from their replies."""

import hashlib

from envhub.env import StepResult


class RemoteEpisode:
    """First and last observation of an episode, its score and its end flags."""

    def __init__(self, start_score: float = 0.0) -> None:
        self._first = self._observation = ""
        self._reward = start_score
        self._is_done = self._is_success = self._is_truncated = False

    async def expert_action(self) -> str | None:
        """Return None: the servers have no expert."""
        return None

    async def render(self) -> str:
        return self._observation

    async def fingerprint(self) -> str:
        """Return the hash of the first observation, the only part of the state available here."""
        return hashlib.sha256(self._first.encode(errors="surrogatepass")).hexdigest()

    def _result(
        self,
        observation: str,
        *,
        is_valid: bool,
        state: str = "",
        metrics: dict[str, float] | None = None,
    ) -> StepResult:
        """Return the result of a step with the episode's current score."""
        self._observation = observation
        return StepResult(
            observation=observation,
            reward=self._reward,
            done=self._is_done,
            is_valid=is_valid,
            is_success=self._is_success,
            state=state,
            is_truncated=self._is_truncated,
            metrics=metrics,
        )
