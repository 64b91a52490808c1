"""The command `new-env`: writes a complete environment file and a training configuration."""

import keyword
import re
from pathlib import Path

from common.errors import ConfigError
from common.repository import CODE, ROOT, with_program_name
from envhub.catalogue.registry import LOADERS
from tools.cli.command_line import ParsedCommand

EXAMPLE = "docs/examples/sort"  # Path without its suffixes .py and .yaml.
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
USAGE = "new-env NAME [to=FOLDER]"
NEXT = """
python run.py check-env {file}:make_spec    check it; shows the meaning of reward and success
python run.py play {file}:make_spec         play it by hand
python run.py sft --config {config}    warm start on demonstrations
python run.py --config {config}        train
""".strip("\n")


def new_env(request: ParsedCommand) -> int:
    """Write `NAME.py` and `NAME.yaml` and print the next commands; return the exit code.

    Raises: ConfigError: an invalid name, or one of the files exists already.
    """
    words = [word for word in request.overrides if "=" not in word]
    options = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    folder = Path(options.pop("to", "environments"))
    if len(words) != 1 or options:
        raise ConfigError(f"run.py {USAGE}")
    name = words[0]
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"{name}: use lower case letters, digits and _, and begin with a letter")
    if name in LOADERS:
        raise ConfigError(f"{name}: an environment of this name exists; use another name")
    texts = {
        folder / f"{name}{suffix}": renamed(
            (CODE / f"{EXAMPLE}{suffix}").read_text(encoding="utf-8"), name, folder
        )
        for suffix in (".py", ".yaml")
    }
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path}: exists already; remove it, or use another name")
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(with_program_name(text), encoding="utf-8")
        print(f"written: {path}")
    steps = NEXT.format(file=folder / f"{name}.py", config=folder / f"{name}.yaml")
    print(with_program_name(steps))
    return 0


def renamed(text: str, name: str, folder: Path) -> str:
    """Return the example text with another name and folder."""
    title = "".join(part.capitalize() for part in name.split("_"))
    text = text.replace(str(Path(EXAMPLE).parent), folder.as_posix())
    for old, new in (("Sort", title), ("runs/sort", f"runs/{name}"), ("/sort", f"/{name}")):
        text = text.replace(old, new)
    return text.replace('name="sort"', f'name="{name}"').replace("env: sort", f"env: {name}")
