"""Changes of live keys while the scheduler works: requests of the owner, applied between steps."""

import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from common.config.live import (
    ConfigChange,
    check_effect,
    check_live,
    last_number,
    live_values,
    read_changes,
    record_change,
    text_at,
    with_values,
)
from common.config.run_config import RunConfig, check_training
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.wire.messages import (
    ConfigChanged,
    ConfigRequest,
    Heartbeat,
    Hello,
    LiveConfig,
    Rejected,
)

logger = logging.getLogger(__name__)

# Seconds after which a change is applied within a step, so that a run without steps can change.
LATEST_S = 60.0
# Steps between the present and an end of the run that may still change: the learner is ahead.
MARGIN_STEPS = 3


@dataclass(slots=True)
class _PendingChange:
    """An accepted request that is not in force yet."""

    request: ConfigRequest
    sender: bytes  # ROUTER identity of the last sender.
    since: float  # Time of the acceptance.


class LiveChanges:
    """The configuration of the run, and the changes of its live keys.

    Example: a request with `learner.lr=1e-5` arrives during step 8 and is accepted. Step 8 ends.
    The scheduler applies the change, saves its state, writes `config.yaml` and the record, and
    answers. It sends the new values to the learner and, with their next heartbeats, to the actors.
    A kill before the state is saved loses the request, and the command sends it again. After a
    later kill the next start completes the change.
    """

    def __init__(self, cfg: RunConfig, run_dir: RunDir, saved: dict[str, Any] | None) -> None:
        """Begin with a configuration; complete a change that is saved but not recorded.

        Args:
            saved: `last` of the scheduler's saved state.
        """
        self.cfg = cfg
        self._run_dir = run_dir
        self._done = {each.request: each for each in read_changes(run_dir.config_changes)}
        self.number = last_number(run_dir.config_changes)
        self._pending: dict[str, _PendingChange] = {}
        self.last = None if saved is None else ConfigChange(**saved)  # The last applied change.
        if self.last is not None and self.last.request not in self._done:
            # A start with other settings may have taken its number.
            self.last = replace(self.last, number=self.number + 1)
            logger.info("completing the interrupted change number=%d", self.last.number)
            self.cfg = with_values(cfg, self.last.new)
            self.record()

    def accept(
        self, request: ConfigRequest, sender: bytes, *, now: float, step: int, is_over: bool
    ) -> ConfigChanged | Rejected:
        """Check a request and keep it until the next step boundary; return the first answer.

        Args:
            step: last step so far.
            is_over: True after the last step.
        """
        done = self._done.get(request.request)
        if done is not None:
            return ConfigChanged(number=done.number, step=done.step)
        try:
            self._checked(request, step=step, is_over=is_over)
        except ConfigError as error:
            return Rejected(reason=str(error))
        pending = self._pending.get(request.request)
        since = now if pending is None else pending.since
        self._pending[request.request] = _PendingChange(request, sender, since)
        return ConfigChanged(number=-1, step=step)

    def _checked(self, request: ConfigRequest, *, step: int, is_over: bool) -> RunConfig:
        """Return the changed configuration. Raises: ConfigError: it is refused."""
        for key in request.new:
            check_live(key)
        if not request.new or request.old.keys() != request.new.keys():
            raise ConfigError("a change needs the present and the new value of the same keys")
        for key, old in request.old.items():
            if (present := text_at(self.cfg, key)) != old:
                raise ConfigError(
                    f"{key}={old}: the run has {key}={present} now, since another change came"
                    " first. Repeat the command"
                )
        cfg = with_values(self.cfg, request.new)
        for key in request.new:
            check_effect(cfg, key)
        check_training(cfg)
        if is_over:
            raise ConfigError("the training of this run is over, so its keys cannot change")
        ends = {self.cfg.train.num_steps, cfg.train.num_steps}
        if len(ends) == 2 and min(ends) < step + MARGIN_STEPS:
            raise ConfigError(
                f"train.num_steps={cfg.train.num_steps}: step {step} is done, and the run can only"
                f" change between ends at step {step + MARGIN_STEPS} or later. Continue a finished"
                " run with `train` and a larger value"
            )
        return cfg

    def take_due(self, now: float, *, is_boundary: bool) -> list[tuple[ConfigRequest, bytes]]:
        """Return the requests to apply now, in the order of their arrival, each once."""
        due = [
            change
            for change in self._pending.values()
            if is_boundary or now - change.since > LATEST_S
        ]
        for change in due:
            del self._pending[change.request.request]
        return [(change.request, change.sender) for change in due]

    def apply(self, request: ConfigRequest, *, step: int, is_over: bool) -> ConfigChange:
        """Change the configuration; the caller saves its state and then calls `record`.

        Raises: ConfigError: another change came first, or the run has ended.
        """
        self.cfg = self._checked(request, step=step, is_over=is_over)
        self.last = ConfigChange(
            number=self.number + 1,
            step=step,
            time_s=time.time(),
            request=request.request,
            old=dict(request.old),
            new=dict(request.new),
        )
        return self.last

    def record(self) -> None:
        """Write the last change to the run directory. Raises: OSError: the disk is full."""
        change = self.last
        if change is None or change.number <= self.number:
            return
        record_change(self._run_dir, self.cfg, change)
        self.number = change.number
        self._done[change.request] = change
        shown = " ".join(f"{key}={change.old[key]}->{new}" for key, new in change.new.items())
        logger.info(
            "changed the live configuration number=%d step=%d %s", change.number, change.step, shown
        )

    def hear(self, message: object) -> LiveConfig | None:
        """Return the live values if the sender of a hello or heartbeat has others."""
        if not isinstance(message, Hello | Heartbeat) or message.config < 0:
            return None
        return self.values() if message.config != self.number else None

    def values(self) -> LiveConfig:
        """Return the message with the live values."""
        return LiveConfig(number=self.number, values=live_values(self.cfg))

    def saved(self) -> dict[str, Any] | None:
        """Return the last change for the scheduler's state."""
        return None if self.last is None else asdict(self.last)

    def report(self) -> dict[str, Any]:
        """Return the number of changes and the last one, for the status."""
        return {"number": self.number, "last": self.saved()}
