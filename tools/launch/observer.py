"""Interface between the launcher and displays of a run: a terminal, a web page, a report."""

from contextlib import AbstractContextManager
from typing import Protocol

from tools.launch.base import Ending, LaunchState


class RunObserver(Protocol):
    """A display of a run during its supervision. It never delays the run."""

    def start(self) -> None:
        """Start the display."""
        ...

    def annotate(self, state: LaunchState) -> LaunchState:
        """Return the launcher's state with the durations that the observer has measured."""
        ...

    def refresh(self) -> None:
        """Show the latest state of the run; called at each poll of the launcher."""
        ...

    def page(self) -> AbstractContextManager[None]:
        """Return a context in which the run's web page is served, if it is enabled."""
        ...

    def stop(self) -> None:
        """Stop the display."""
        ...

    def conclude(self, ending: Ending, *, wall_s: float, peak_memory_bytes: int) -> None:
        """Show the ending of the run, and write the report of a finished run."""
        ...
