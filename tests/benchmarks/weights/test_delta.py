"""Laws of the measurement of versions as changes."""

import io

from benchmarks.suite import Suite
from benchmarks.weights.delta import check_rate, measure

SMALL = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
}


def test_smaller_rates_send_fewer_bytes_and_the_same_version() -> None:
    slow, fast = (measure(SMALL, lr=lr, num_steps=3, seed=0) for lr in (1e-7, 1e-5))
    assert len(slow.apply_s) == len(fast.apply_s) == 3, "each version was applied and compared"
    assert 0 < max(slow.bytes_frac) < min(fast.bytes_frac) < 0.5
    assert max(slow.changed_frac) < 0.02


def test_dense_rate_breaks_the_bound_on_bytes() -> None:
    suite = Suite(out=io.StringIO())
    check_rate(suite, SMALL, lr=0.5, num_steps=2)
    assert not suite.rows[0].kept
    assert suite.rows[0].value == 1.0, "the whole version is sent"
