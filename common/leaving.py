"""The end of a process that has nothing to save and takes long to tidy up."""

import logging
import multiprocessing.util
import os


def leave(code: int) -> None:
    """End this process at once with an exit code.

    Semaphores are removed first, such as that of tqdm, which torch.compile loads. The resource
    tracker of the parent process would report them as leaked.
    """
    multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    logging.shutdown()
    os._exit(code)
