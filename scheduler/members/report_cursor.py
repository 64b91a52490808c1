"""Cumulative acknowledgement of the learner's reports."""


class ReportCursor:
    """Counts the learner's numbered messages since its hello.

    Example: messages 1 and 2 are received and the state is saved. Message 3 is lost, and 4 is
    received: num_heard stays at 2 and num_saved is 2. The learner gets these numbers and resends
    all messages after 2.
    """

    def __init__(self) -> None:
        self.num_heard = 0
        self.num_saved = 0
        self.closed_below = 0  # Number of the oldest training group that was open at the last save.

    def begin(self) -> None:
        """Restart the count: a learner numbers its messages from 1 after its hello."""
        self.num_heard = self.num_saved = 0

    def hear(self, number: int) -> None:
        """Count a handled message; a message after a gap does not count."""
        self.num_heard += number == self.num_heard + 1

    def save(self, *, closed_below: int) -> None:
        """Record that all counted messages are on disk."""
        self.num_saved = self.num_heard
        self.closed_below = closed_below
