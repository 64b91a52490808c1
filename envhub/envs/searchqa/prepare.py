"""Command that prepares files before a run: an index of a corpus, or the generated world as files.

python -m envhub.envs.searchqa.prepare index CORPUS [FOLDER]
python -m envhub.envs.searchqa.prepare world FOLDER
"""

import argparse
import logging
import sys
from pathlib import Path

from common.config.envs import SearchqaOptions
from envhub.env import EnvFailure
from envhub.envs.searchqa.index import build_index
from envhub.envs.searchqa.library import index_folder
from envhub.envs.searchqa.world.world import write_world

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Run the command line; exit with code 2 and a message on failure."""
    parser = argparse.ArgumentParser(prog="python -m envhub.envs.searchqa.prepare")
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser("index", help="build the index of a corpus, if there is none")
    index.add_argument("corpus", type=Path)
    index.add_argument(
        "folder", type=Path, nargs="?", help="folder of the index (envs.searchqa.index_dir)"
    )
    world = commands.add_parser("world", help="write the generated world: questions and corpus")
    world.add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "world":
            write_world(chosen.folder)
            logger.info("wrote folder=%s", chosen.folder)
        else:
            options = SearchqaOptions(corpus=str(chosen.corpus), index_dir=str(chosen.folder or ""))
            logger.info("index folder=%s", build_index(chosen.corpus, index_folder(options)))
    except (EnvFailure, OSError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1:])
