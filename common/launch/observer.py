"""The seam between the launcher and displays of a run: a terminal, a web page, a report."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from common.launch.base import Ending, LaunchState


class RunObserver(Protocol):
    """It shows a run while the launcher supervises it. It never holds the run up."""

    def start(self) -> None:
        """Begin to show the run."""
        ...

    def annotate(self, state: LaunchState) -> LaunchState:
        """Return the launcher's state with the durations that the observer has measured."""
        ...

    def refresh(self) -> None:
        """Show the newest state of the run; called at each poll of the launcher."""
        ...

    def page(self) -> AbstractContextManager[None]:
        """Return a context in which a web page over the run is served, if one is wanted."""
        ...

    def stop(self) -> None:
        """End the display."""
        ...

    def conclude(self, ending: Ending, *, wall_s: float, peak_memory_bytes: int) -> None:
        """Show how the run has ended, and write its report if it has finished."""
        ...


class NoObserver:
    """A `RunObserver` that shows nothing."""

    def start(self) -> None:
        return None

    def annotate(self, state: LaunchState) -> LaunchState:
        return state

    def refresh(self) -> None:
        return None

    def page(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self) -> None:
        return None

    def conclude(self, ending: Ending, *, wall_s: float, peak_memory_bytes: int) -> None:
        return None
