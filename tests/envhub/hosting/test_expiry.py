"""Laws of expiring entries: use restarts their idle time."""

from envhub.hosting.expiry import ExpiringTable


class Clock:
    """A clock that stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def table() -> tuple[ExpiringTable[str, str], Clock]:
    clock = Clock()
    entries: ExpiringTable[str, str] = ExpiringTable(10.0, clock)
    entries.put("a", "first")
    entries.put("b", "second")
    return entries, clock


def test_used_entry_stays_and_unused_entry_expires() -> None:
    entries, clock = table()
    clock.now_s = 8.0
    assert entries.find("a") == "first"
    clock.now_s = 10.0
    assert entries.find("b") is None  # The entry is expired but not yet removed.
    assert entries.pop_expired() == ["second"]
    assert list(entries) == ["first"]
    clock.now_s = 18.0
    assert entries.pop_expired() == ["first"]
    assert len(entries) == 0


def test_kept_entry_outlives_lease_until_released() -> None:
    entries, clock = table()
    clock.now_s = 10.0
    assert entries.pop_expired(keeps=lambda entry: entry == "first") == ["second"]
    entries.renew("a")
    entries.renew("b")  # gone: nothing to renew
    assert entries.find("a") == "first"
    assert entries.find("b") is None


def test_entry_is_taken_out_once() -> None:
    entries, _ = table()
    assert entries.pop("a") == "first"
    assert entries.pop("a") is None
