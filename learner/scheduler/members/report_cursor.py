"""How far the learner's reports have come: a cumulative acknowledgement."""


class ReportCursor:
    """Counts the learner's numbered messages since its hello.

    Example: 1, 2 are heard, the state is saved, 3 is lost on the way, 4 comes: num_heard stays at 2
    and num_saved is 2. The learner sees that nothing after 2 is heard and sends all of it again.
    """

    def __init__(self) -> None:
        self.num_heard = 0
        self.num_saved = 0
        self.closed_below = 0  # number of the oldest training group that was open at the save

    def begin(self) -> None:
        """Start anew: a learner that says hello counts from 1."""
        self.num_heard = self.num_saved = 0

    def hear(self, number: int) -> None:
        """Count a message that has been handled; one behind a gap does not count."""
        self.num_heard += number == self.num_heard + 1

    def save(self, *, closed_below: int) -> None:
        """Note that what was heard is on disk."""
        self.num_saved = self.num_heard
        self.closed_below = closed_below
