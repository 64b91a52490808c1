"""Renders all chat templates of the product, with the settings of the run in their prompts.

The settings are the run's date, its own template and the variables of the template. They are fixed
once in each process.

A template is a program of the model's author. Jinja's sandbox keeps it from the machine, and a time
limit ends it. The limit cannot end a single operation, so products and powers have limits of size.
"""

import ctypes
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, cast

from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError
from common.repository import ROOT

FILES = ("chat_template.jinja", "tokenizer_config.json")  # Files that may contain a chat template.
DATE_STRING = "%d %b %Y"  # Format of `date_string` in Llama's templates.
CLOCK = "strftime_now"
DATE = "date_string"
MAX_RENDER_S = 10.0  # CPU time of one text. A template needs milliseconds.
MAX_PRODUCT = 1 << 24  # Largest length of a repeated text or list.
MAX_NUMBER_BITS = 4_096  # Largest product or power.
POLL_S = 0.5  # Seconds between two checks of the running templates.
# A template with its own default for `date_string` keeps it, as in other inference servers.
_HAS_DEFAULT = re.compile(rf"\b{DATE}\s+is\s+(not\s+)?defined|\b{DATE}\s*\|\s*(default|d)\b")


def _checked_product(left: Any, right: Any) -> Any:
    """Return a product. Raises: SecurityError: it is too large for a template."""
    sizes = [_bits(each) for each in (left, right)]
    texts = [each for each in (left, right) if isinstance(each, Sized)]
    times = [each for each in (left, right) if isinstance(each, int)]
    if texts and times and len(texts[0]) * times[0] > MAX_PRODUCT:
        raise SecurityError(f"a chat template repeats a text to more than {MAX_PRODUCT} items")
    if sum(sizes) > MAX_NUMBER_BITS:
        raise SecurityError(f"a chat template multiplies to more than {MAX_NUMBER_BITS} bits")
    return left * right


def _checked_power(base: Any, exponent: Any) -> Any:
    """Return a power. Raises: SecurityError: it is too large for a template."""
    if isinstance(exponent, int) and _bits(base) * exponent > MAX_NUMBER_BITS:
        raise SecurityError(f"a chat template has a power of more than {MAX_NUMBER_BITS} bits")
    return base**exponent


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _limit_operators() -> None:
    """Limit the operators of all templates that are compiled later in this process."""
    sandbox = ImmutableSandboxedEnvironment
    sandbox.intercepted_binops = frozenset(("*", "**"))
    table = {**sandbox.default_binop_table, "*": _checked_product, "**": _checked_power}
    sandbox.default_binop_table = table


_limit_operators()  # transformers makes the environment of a template itself.


class PromptSettings(Protocol):
    """The keys of `model` that change prompts."""

    @property
    def date(self) -> str: ...
    @property
    def chat_template(self) -> str: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...


@dataclass(slots=True)
class _Process:
    """The settings of this process: those of its run."""

    date: str = ""  # YYYY-MM-DD; the day of the first prompt without a run.
    template: str = ""  # Text of `model.chat_template`; "": the tokenizer's own template.
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


_process = _Process()


class _TooLong(BaseException):
    """Raised in a thread whose template exceeds its time. No handler of errors catches it."""


class _RenderWatch(threading.Thread):
    """A thread that ends templates which exceed their CPU time.

    Waits for: a template to begin, then `POLL_S`.
    Unblocked by: nothing; it is a daemon.
    """

    def __init__(self) -> None:
        super().__init__(name="templates", daemon=True)
        self._lock = threading.Lock()
        self._running: dict[int, tuple[int, float]] = {}  # CPU clock and its time, by thread.
        self._has_work = threading.Event()
        self._too_long: set[str] = set()  # Templates that were ended once.

    def rendered(self, template: str, render: Callable[[], str], *, limit_s: float) -> str:
        """Return the result of `render`. Raises: ConfigError: it exceeds its CPU time."""
        error = ConfigError(
            f"the chat template computes for more than {limit_s:g} s; repair it, or give another"
            " one (model.chat_template)"
        )
        if template in self._too_long:
            raise error
        try:
            return self._watched(render, limit_s=limit_s)
        except _TooLong:
            self._too_long.add(template)
            raise error from None

    def _watched(self, render: Callable[[], str], *, limit_s: float) -> str:
        """Return the result of `render`. Raises: _TooLong."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        with self._lock:
            self._running[thread] = (clock, time.clock_gettime(clock) + limit_s)
        self._has_work.set()
        is_raised = False
        try:
            return render()
        except _TooLong:
            is_raised = True
            raise
        finally:
            with self._lock:
                is_ended = self._running.pop(thread, None) is None
            if is_ended and not is_raised:
                time.sleep(0)  # The exception is raised here, and not in later code.

    def run(self) -> None:
        """Watch for the life of the process."""
        while True:
            self._has_work.wait()
            time.sleep(POLL_S)
            with self._lock:
                if not self._running:
                    self._has_work.clear()
                for thread, (clock, until) in [*self._running.items()]:
                    if time.clock_gettime(clock) > until:
                        del self._running[thread]
                        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                        raise_in(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))


@cache
def _render_watch() -> _RenderWatch:
    """Return the watch of this process."""
    watch = _RenderWatch()
    watch.start()
    return watch


os.register_at_fork(after_in_child=_render_watch.cache_clear)


def today() -> str:
    """Return the date of this machine as YYYY-MM-DD."""
    return date.today().isoformat()


def fix_date(day: str) -> None:
    """Set the date in all prompts of this process; "" changes nothing.

    Args:
        day: `model.date`.
    """
    _process.date = day or _process.date


def fix_prompts(model: PromptSettings) -> None:
    """Set the date, the chat template and its variables in all prompts of this process.

    Raises: ConfigError: `model.chat_template` cannot be read.
    """
    fix_date(model.date)
    fix_template(template_at(model), model.chat_template_kwargs)


def template_at(model: PromptSettings) -> Path | None:
    """Return the file of `model.chat_template`; None: the tokenizer's own template is used."""
    return ROOT / model.chat_template if model.chat_template else None


def fix_template(path: Path | None, variables: Mapping[str, Any]) -> None:
    """Set the chat template and its variables in all prompts of this process.

    Args:
        path: `model.chat_template`; None: each tokenizer's own template.
        variables: `model.chat_template_kwargs`.

    Raises: ConfigError: the file cannot be read; the message has the key.
    """
    _process.template = "" if path is None else read_template(path)
    _process.variables = dict(variables)


def read_template(path: Path) -> str:
    """Return the text of `model.chat_template`. Raises: ConfigError: it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise ConfigError(f"model.chat_template={path}: {reason}; give a jinja file") from error
    if not text.strip():
        raise ConfigError(f"model.chat_template={path}: the file is empty; give a jinja file")
    return text


def template_of(tokenizer: Any) -> str:
    """Return the chat template for the prompts of a tokenizer; "": it has none.

    Of several named templates, the one named "default" is used, as transformers does. A byte order
    mark in the tokenizer's file is no part of a template.
    """
    configured = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(configured, dict):
        configured = cast(dict[str, str], configured).get("default", "")
    return _process.template or str(configured).removeprefix("\ufeff")


def fingerprint(tokenizer: Any) -> str:
    """Return a digest of a vocabulary and its chat template with the settings of this process.

    Texts with equal fingerprints have equal tokens. The date is no part of it.
    """
    parts = (sorted(tokenizer.get_vocab().items()), template_of(tokenizer), _process.variables)
    text = json.dumps(parts, sort_keys=True, default=str)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def prompt_date() -> str:
    """Return the date in the prompts of this process. It stays the same after midnight."""
    _process.date = _process.date or today()
    return _process.date


def names_date(folder: Path, template: Path | None = None) -> bool:
    """Return whether the chat template of a model may use the date.

    Args:
        template: the file of `model.chat_template`; None: the template in the model's folder.
    """
    paths = [template] if template else [folder / name for name in FILES]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    return any(CLOCK in text or DATE in text for text in texts)


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    day: str = "",
    limit_s: float = MAX_RENDER_S,
) -> str:
    """Return the text of a conversation from the tokenizer's chat template.

    A template reads the date with `strftime_now` or `date_string`. Every prompt of a run contains
    the date of its start, with the time 00:00. Members of a group that are sampled on two days
    therefore have equal prompts.

    Args:
        day: YYYY-MM-DD; "": the date of this process.
        limit_s: limit of the CPU time.

    Raises: ConfigError: the template exceeds it; errors of the template.
    """
    configured = getattr(tokenizer, "chat_template", None)
    # transformers selects one of several named templates by the tools.
    template = _process.template if isinstance(configured, dict) else template_of(tokenizer)

    def render() -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **({} if template in ("", configured) else {"chat_template": template}),
                **_process.variables,
                **_date_of(tokenizer, day or prompt_date()),
            )
        )

    return _render_watch().rendered(template or json.dumps(configured), render, limit_s=limit_s)


def _date_of(tokenizer: Any, day: str) -> dict[str, Any]:
    """Return the template variables for the date, {} for a template without a date."""
    template = template_of(tokenizer)
    moment = datetime.fromisoformat(day)
    variables: dict[str, Any] = {}
    if CLOCK in template:
        variables[CLOCK] = moment.strftime
    if DATE in template and not _HAS_DEFAULT.search(template):
        variables[DATE] = moment.strftime(DATE_STRING)
    return variables
