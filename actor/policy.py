"""The section `policy`: a policy behind an endpoint, for the commands `eval` and `serve`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.config.actor import AgentFormat
from common.config.knobs import URL, WORD, Contradiction, knob, seconds
from common.config.run_config import RunConfig

LIMIT_KEYS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySection:
    """A policy behind an OpenAI-compatible endpoint, for the command `eval`.

    The command `serve` provides such an endpoint. It requires the key from the variable
    `api_key_env`.
    """

    url: str = knob(
        "",
        "Names the URL of a chat endpoint, such as https://host/v1. Empty plays model.path in an "
        "engine on this machine.",
        form=URL,
        also="",
    )
    model: str = knob("", "Names the model at the endpoint.")
    api_key_env: str = knob(
        "",
        "Names the environment variable with the API key. Empty sends no key.",
        form=WORD,
        also="",
    )
    port: int = knob(
        0,
        "Sets the port at which the command `serve` listens. 0 chooses a free one.",
        ge=0,
        le=65535,
    )
    max_model_len: int = knob(
        0,
        "Sets the context of the command `serve` in tokens, for prompt and answer together. 0 "
        "takes the model's whole context, as far as the KV cache (actor.kv_cache_gib) holds it. "
        "With policy.role, 0 takes actor.max_model_len.",
        ge=0,
    )
    role: str = knob(
        "",
        "Names the role that the command `serve` has in the run `run.name`. The run then finds its "
        "address and observes it. Empty serves no run.",
        form=WORD,
        also="",
    )
    past_every_s: float = seconds(
        0.0,
        "Serves a past version of the run policy.role belongs to with the command `serve`, and "
        "another one after this many seconds. 0 serves model.path.",
        ge=0,
    )
    temperature: float = knob(1.0, "Sets the sampling temperature of the endpoint.", ge=0, le=100)
    max_turn_tokens: int = knob(
        1024, "Limits the sampled tokens of a turn, including hidden reasoning.", ge=1
    )
    limit_key: str = knob(
        "max_tokens", "Selects the request field for policy.max_turn_tokens.", one_of=LIMIT_KEYS
    )
    max_concurrent: int = knob(
        16, "Limits the concurrent requests to the endpoint.", ge=1, le=10**5
    )
    timeout_s: float = seconds(
        300.0, "Limits the seconds in which the endpoint must answer a request.", gt=0
    )
    max_tries: int = knob(
        6, "Limits the tries of a turn. An episode fails if none is answered.", ge=1, le=1000
    )
    backoff_s: float = seconds(
        1.0,
        "Sets the seconds before the second try. The wait doubles with each further try.",
        ge=0,
        must="be at most max_backoff_s",
    )
    max_backoff_s: float = seconds(
        60.0, "Limits the seconds between two tries, even if Retry-After is longer.", ge=0
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.url and not self.model:
            yield "model", self.model, "must name a model of the endpoint policy.url"
        if self.past_every_s and not self.role:
            yield "past_every_s", self.past_every_s, "must be 0 without policy.role"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig(RunConfig):
    """The configuration of `serve`, and of other commands with a policy behind an endpoint."""

    policy: PolicySection = field(default_factory=PolicySection)

    def contradictions(self) -> Iterator[Contradiction]:
        yield from RunConfig.contradictions(self)
        if self.policy.url and self.actor.format is AgentFormat.FUNCTION_CALL:
            law = 'must be "" with actor.format=function_call'
            yield (
                "policy.url",
                self.policy.url,
                f"{law}: that format needs the model's own chat template",
            )
