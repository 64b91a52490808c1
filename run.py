"""The command line: parse it, find tools/cli/COMMAND.py, and run it."""

import gc
import io
import logging
import os
import sys
from typing import NoReturn

# Libraries allocate a million lasting objects. Python's own threshold (700) slows a start by 20 %.
gc.set_threshold(10_000)

try:
    from common.errors import ConfigError, NotStarted, TrialFailed
    from common.host.loopback import keep_loopback_direct
    from common.host.process_settings import complete_process_settings, start_with_plain_settings
    from common.repository import ROOT
    from tools.cli.command_line import parse, run_command
    from tools.cli.output import EXIT_OUTPUT_CLOSED, flush_output, has_lost_output, print_error
    from tools.launch.base import EXIT_FAILED, EXIT_NOT_STARTED
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed for {sys.executable}. `make setup` installs all"
        " requirements. Then use .venv/bin/python run.py, or run source .venv/bin/activate first."
    )


def main(argv: list[str]) -> int:
    """Return the exit code of the command line."""
    try:
        request = parse(argv)
        complete_process_settings(os.environ)
        os.chdir(ROOT)
        keep_loopback_direct()
        return run_command(request)
    except (ConfigError, TrialFailed) as error:
        print_error(str(error))
        return EXIT_FAILED if isinstance(error, TrialFailed) else 2
    except NotStarted as error:
        logging.exception("the process ended before its start was complete")
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_STARTED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # The only broad handler of a role: its log holds the traceback.
        if isinstance(error, BrokenPipeError) and has_lost_output():
            return EXIT_OUTPUT_CLOSED
        logging.exception("the process ended with an error")
        return EXIT_FAILED


def run() -> NoReturn:
    """Run the command line, as `python run.py` or as the installed script `longstride`."""
    start_with_plain_settings()
    if isinstance(sys.stdout, io.TextIOWrapper):  # A pipe gets each line at once.
        sys.stdout.reconfigure(line_buffering=True)
    sys.exit(flush_output(main(sys.argv[1:])))


if __name__ == "__main__":
    run()
