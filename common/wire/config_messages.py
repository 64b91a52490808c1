"""Messages about live keys: keys of the configuration that change while a run works.

Example: the owner's command sends a ConfigRequest. The scheduler answers that it is accepted. At
the next step boundary the scheduler applies it and answers with its number. The learner and the
actors receive the new values as LiveConfig.
"""

from dataclasses import dataclass, field

from common.wire.access.bounds import Count, Id, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """Command of the owner -> scheduler: change live keys."""

    request: Id  # Random per request; a repeated request has the same one.
    # Keys with their present and their new values, as in an override "key=value".
    old: dict[str, str] = field(default_factory=dict[str, str])
    new: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChanged:
    """Answer to ConfigRequest, first when it is accepted and again when it is in force."""

    number: Version  # Number of the change in the run; -1: it is accepted, and not in force yet.
    step: Version  # Last step before the change; with `number` -1 the last step so far.


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """Scheduler -> learner or actor: the values of the live keys. Sent after every change."""

    number: Count  # Number of the last change. A heartbeat carries the sender's current number.
    values: dict[str, str]  # Keys with their values, as in an override "key=value".
