"""vLLM's repeated notices in the engine's processes: the first is logged, the others counted."""

import logging

CAST_LOGGER = "vllm.model_executor.models.utils"
CAST_NOTICE = "Attempted to load weight"


class RepeatFilter(logging.Filter):
    """Passes the first record with a beginning, and counts all of them.

    Example: 311 weights of a checkpoint in fp32 are loaded into an engine in bf16. vLLM warns about
    each. One warning is logged, and `num_seen` is 311.
    """

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning
        self.num_seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a matching record; return False for all but the first."""
        if not str(record.msg).startswith(self._beginning):
            return True
        self.num_seen += 1
        record.msg = f"{record.msg}; the warnings about further weights are left out"
        return self.num_seen == 1


def count_cast_weights() -> RepeatFilter:
    """Log one warning about the dtype of weights; return the filter that counts them."""
    notice = RepeatFilter(CAST_NOTICE)
    logging.getLogger(CAST_LOGGER).addFilter(notice)
    return notice
