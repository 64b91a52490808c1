"""Options of a teacher: a second policy whose probabilities the trained policy approaches."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import PATH, URL, Contradiction, knob, seconds


class TeacherForm(StrEnum):
    """Form of the reverse KL divergence from the teacher.

    sampled: the advantage of a sampled token is log teacher - log pi. It needs one number a token.
    topk: the exact KL(pi | teacher) over the teacher's k most probable tokens and one remainder,
    with its gradient.
    """

    SAMPLED = "sampled"
    TOPK = "topk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """A teacher of the policy (on-policy distillation). Without path and url there is none."""

    path: str = knob(
        "",
        "Names the teacher's model folder. The run starts an engine with it.",
        form=PATH,
        also="",
    )
    url: str = knob(
        "",
        "Names the base URL of an endpoint that returns prompt logprobs, such as vLLM's "
        "http://host:8000/v1.",
        form=URL,
        also="",
    )
    model: str = knob("", "Names the teacher's model at algorithm.teacher.url.")
    key_env: str = knob("", "Names the environment variable with the key of the endpoint.")
    coef: float = knob(1.0, "Sets the weight of the reverse KL from the teacher.", gt=0, le=1000)
    reward_coef: float = knob(
        0.0,
        "Multiplies the advantages of the rewards beside a teacher. 0 learns from the teacher "
        "alone.",
        ge=0,
        le=1000,
    )
    form: TeacherForm = knob(TeacherForm.SAMPLED, "Selects the form of the reverse KL.")
    k: int = knob(
        16, "With form=topk, compares this many most probable tokens of the teacher.", ge=1, le=1024
    )
    timeout_s: float = seconds(
        60.0, "Limits the seconds of one request to the teacher.", gt=0, le=3600
    )
    concurrency: int = knob(16, "Limits the requests to the teacher at once.", ge=1, le=4096)
    max_waiting: int = knob(
        512,
        "Accepts no training episodes while at least this many wait for the teacher.",
        ge=1,
        le=10**6,
    )
    serve: list[str] = knob(
        [], "Lists overrides for the engine of algorithm.teacher.path, as KEY=VALUE."
    )
    gpus: list[int] = knob(
        [],
        "Lists the numbers of the GPUs of this engine. [] means the first GPU that no role uses.",
        ge=0,
        le=1000,
    )

    @property
    def is_on(self) -> bool:
        """Whether the policy has a teacher."""
        return bool(self.path or self.url)

    @property
    def num_top(self) -> int:
        """Number of the teacher's most probable tokens in an answer; 0: the prompt's token only."""
        return self.k if self.form is TeacherForm.TOPK else 0

    def contradictions(self) -> Iterator[Contradiction]:
        if self.path and self.url:
            yield "url", self.url, "must be empty with algorithm.teacher.path: one teacher only"
        if self.url and not self.model:
            yield "model", "", "must name the model at algorithm.teacher.url"
        for each in self.serve:
            if "=" not in each:
                yield "serve", each, "must be KEY=VALUE, such as actor.gpu_memory_frac=0.5"
