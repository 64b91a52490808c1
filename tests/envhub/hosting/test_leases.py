"""Laws of leases: unused entries expire, and use renews them."""

from envhub.hosting.leases import LeaseTable


class Clock:
    """A clock that stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def table() -> tuple[LeaseTable[str, str], Clock]:
    clock = Clock()
    leases: LeaseTable[str, str] = LeaseTable(10.0, clock)
    leases.put("a", "first")
    leases.put("b", "second")
    return leases, clock


def test_used_lease_is_renewed_and_unused_entry_expires() -> None:
    leases, clock = table()
    clock.now_s = 8.0
    assert leases.find("a") == "first"
    clock.now_s = 10.0
    assert leases.find("b") is None  # The entry is expired but not yet removed.
    assert leases.pop_expired() == ["second"]
    assert list(leases) == ["first"]
    clock.now_s = 18.0
    assert leases.pop_expired() == ["first"]
    assert len(leases) == 0


def test_kept_entry_outlives_lease_until_released() -> None:
    leases, clock = table()
    clock.now_s = 10.0
    assert leases.pop_expired(keeps=lambda entry: entry == "first") == ["second"]
    leases.renew("a")
    leases.renew("b")  # gone: nothing to renew
    assert leases.find("a") == "first"
    assert leases.find("b") is None


def test_entry_is_taken_out_once() -> None:
    leases, _ = table()
    assert leases.pop("a") == "first"
    assert leases.pop("a") is None
