"""Options of the players in environments with several seats: `actor.seats`."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.config.knobs import PATH, URL, WORD, Contradiction, knob, seconds

SELF = "self"  # The current policy.
RANDOM = "random"  # Random valid play.
EXPERT = "expert"  # The environment's scripted expert.
PAST = "checkpoints"  # A past version of the run.
ENDPOINT = "url"  # The model at `actor.seats.url`.
NAMED = (SELF, RANDOM, EXPERT, PAST, ENDPOINT)  # All other opponents are model folders.


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatsOptions:
    """Players of the seats that an episode does not train. See docs/SEATS.md."""

    trained: list[int] = knob(
        [],
        "Lists the seats, from 0 on, that the policy plays and learns from. Each group has one of "
        "them. [] means all seats.",
        ge=0,
        le=1000,
    )
    opponents: list[str] = knob(
        [SELF],
        "Lists the players of the other seats in training: self, random, expert, checkpoints, url, "
        "or a model folder. Each group has one of them.",
        form=PATH,
    )
    eval_opponents: list[str] = knob(
        [RANDOM],
        "Lists the players of the other seats in evaluations: random, expert, self, url, or a "
        "model folder. Each sample of an item has one of them.",
        form=PATH,
    )
    num_past: int = knob(1, "Starts this many engines for the opponent checkpoints.", ge=1, le=1000)
    past_every_s: float = seconds(
        600.0,
        "Gives an engine of the opponent checkpoints another past version after this many seconds.",
        gt=0,
    )
    url: str = knob(
        "",
        "Names the base URL of a chat endpoint for the opponent `url`, such as "
        "http://host:8000/v1.",
        form=URL,
        also="",
    )
    model: str = knob("", "Names the model at actor.seats.url.")
    api_key_env: str = knob(
        "",
        "Names the environment variable with the key of actor.seats.url. Empty sends no key.",
        form=WORD,
        also="",
    )
    timeout_s: float = seconds(
        60.0, "Limits the seconds of one request to an opponent.", gt=0, le=3600
    )
    max_tries: int = knob(
        6,
        "Limits the tries of an opponent's turn. Without an answer the episode fails; it gets no "
        "reward.",
        ge=1,
        le=1000,
    )
    serve: list[str] = knob(
        [], "Lists overrides for the engines of opponents that are model folders, as KEY=VALUE."
    )
    gpus: list[int] = knob(
        [],
        "Lists the number of a GPU for each engine of an opponent, first of the folders, then of "
        "the past versions. [] means GPUs that no role uses.",
        ge=0,
        le=1000,
    )

    def folders(self, *, in_training: bool = True) -> list[str]:
        """Return the model folders among the opponents, each once.

        Args:
            in_training: include the opponents of training.
        """
        names = [*(self.opponents if in_training else ()), *self.eval_opponents]
        return [name for name in dict.fromkeys(names) if name not in NAMED]

    def contradictions(self) -> Iterator[Contradiction]:
        for name in ("opponents", "eval_opponents"):
            if not getattr(self, name):
                yield name, [], f"must name at least one of {', '.join(NAMED)}, or a model folder"
        if PAST in self.eval_opponents:
            law = "cannot name checkpoints: an evaluation needs fixed opponents. Name a folder"
            yield "eval_opponents", self.eval_opponents, law
        is_asked = ENDPOINT in (*self.opponents, *self.eval_opponents)
        if is_asked and not self.url:
            yield "url", "", "must name the endpoint of the opponent `url`"
        if self.url and not self.model:
            yield "model", "", "must name the model at actor.seats.url"
        for each in self.serve:
            if "=" not in each:
                yield "serve", each, "must be KEY=VALUE, such as actor.gpu_memory_frac=0.3"
