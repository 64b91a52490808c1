"""Compares the teacher's tokenizer and context with those of the policy."""

from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.http.model_endpoint import Refused
from learner.teacher.endpoint import TeacherEndpoint

# Texts of many kinds: words, code, digits, spaces, and letters of several scripts.
PROBES = (
    "The agent goes north, picks up the red key and opens the door.",
    "def f(x):\n\treturn {'a': [1, 22, 333.5], \"b\": x ** 2}  # 100 %",
    "  two spaces,\n\n\nthree lines; naïve Übergröße, 東京, Москва, 🙂",
)
# Tokens in one request that searches for the end of the teacher's vocabulary.
SEARCHED = 1 << 20
NEIGHBOURS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyCheck:
    """The tokenizer that a teacher must share, and the context that it needs."""

    tokenizer: Any
    context: int  # Tokens of the longest episode.
    name: str  # "algorithm.teacher.path=..." or "algorithm.teacher.url=...".

    async def run(self, endpoint: TeacherEndpoint) -> None:
        """Ask the endpoint for the ids of texts, the size of its vocabulary and its context.

        Raises:
            ConfigError: the teacher has another tokenizer, or a context that is too short.
            Unanswered, Refused: as `TeacherEndpoint.post`.
        """
        own_size = len(self.tokenizer)
        reply: dict[str, Any] = {}
        for text in PROBES:
            reply = await endpoint.tokenize(text)
            found = reply.get("tokens")
            own = self.tokenizer.encode(text, add_special_tokens=False)
            if found != own:
                size = await self._size(endpoint, reply)
                raise ConfigError(
                    f"{self.name}: the teacher has another tokenizer than the policy. It encodes"
                    f" {text[:20]!r}... as {found!s:.60}, the policy as {own!s:.60}. The teacher's"
                    f" vocabulary has {size} tokens, the policy's {own_size}. Choose a teacher of"
                    " the policy's family"
                )
        size = await self._size(endpoint, reply)
        if size != own_size:
            raise ConfigError(
                f"{self.name}: the teacher's vocabulary has {size} tokens, and the policy's has"
                f" {own_size}. Choose a teacher with the policy's tokenizer"
            )
        context = int(reply.get("max_model_len") or 0)
        if 0 < context <= self.context:
            raise ConfigError(
                f"{self.name}: the teacher's context has {context} tokens. Scoring an episode of"
                f" actor.max_model_len={self.context} needs one more, {self.context + 1}. Lower"
                " actor.max_model_len, or raise the teacher's max_model_len"
            )

    async def _size(self, endpoint: TeacherEndpoint, reply: dict[str, Any]) -> int:
        """Return the size of the teacher's vocabulary.

        Our own endpoint reports it. vLLM's server does not: the search asks for the text of tokens
        beyond an id, which is empty beyond the end.
        """
        if isinstance(size := reply.get("vocab_size"), int):
            return size
        low = 0
        high = SEARCHED
        own = len(self.tokenizer)
        if await self._ends_at(endpoint, own):
            return own
        while low < high:
            middle = (low + high) // 2
            if await self._has_text(endpoint, middle):
                low = middle + 1
            else:
                high = middle
        return low

    async def _ends_at(self, endpoint: TeacherEndpoint, size: int) -> bool:
        return await self._has_text(endpoint, size - 1) and not await self._has_text(endpoint, size)

    async def _has_text(self, endpoint: TeacherEndpoint, start: int) -> bool:
        """Return whether a token from an id on exists; a few may be empty."""
        try:
            return bool(await endpoint.detokenize([*range(start, start + NEIGHBOURS)]))
        except Refused:  # The server refuses an id beyond its vocabulary.
            return False
