"""The smallest policy for the tests of offline training."""

from tools.offline.config import SftSection

TINY = SftSection(
    from_scratch=True,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    vocab_size=300,
    num_epochs=1,
    batch_tokens=64,
)
