"""Enrolment of nodes that join without the run's directory: keys and configuration."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.load import sections_as_yaml
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.chat_template import template_at
from common.join.files import PART_BYTES, TEMPLATE, list_shared
from common.wire.access.identities import Identities, Identity, add_identity
from common.wire.addresses import is_loopback
from common.wire.messages import (
    NAME_IN_USE,
    Enrolment,
    FilePart,
    FileRequest,
    JoinRequest,
    Rejected,
    SharedFile,
)
from scheduler.members.older_code import default_keys

logger = logging.getLogger(__name__)

_SAMPLING_AND_TRAINING = (
    "run",
    "train",
    "model",
    "algorithm",
    "scheduler",
    "learner",
    "actor",
    "envhub",
    "log",
)
SECTIONS = {  # Sections of the configuration that each role needs.
    "actor": (*_SAMPLING_AND_TRAINING, "groups"),
    "envhub": ("run", "tasks", "groups", "scheduler", "actor", "envhub", "env", "envs", "log"),
    "learner": _SAMPLING_AND_TRAINING,
}
KEY_CHARS = 40  # Characters of a key in Z85.
# Keys of a section that are not sent: secrets and values of this machine.
SECRET = {"envhub": ("url", "token", "host", "port")}


class Enrolments:
    """Answers the requests of joining nodes. Each node gets its own key, bound to its name.

    A name cannot be used again while its holder is alive. After the holder has died or left, a node
    may take the name with another key; the old key is then invalid.
    """

    def __init__(self, cfg: RunConfig, keys: Path) -> None:
        """Store the public keys in the folder `keys`."""
        self._cfg = cfg
        self._keys = keys
        self._known = Identities(keys)
        self._files: list[SharedFile] = []

    def configure(self, cfg: RunConfig) -> None:
        """Use another configuration for nodes that join from now on."""
        self._cfg = cfg

    def answer(self, message: object, is_alive: Callable[[str], bool] = lambda _: False) -> Any:
        """Return the answer to a node's request, None for any other message.

        `is_alive` returns whether the holder of a name is alive.
        """
        match message:
            case JoinRequest():
                reason = self._refusal_of(message)
                return Rejected(reason=reason) if reason else self._enrol(message, is_alive)
            case FileRequest():
                return self._part(message)
            case _:
                return None

    def _refusal_of(self, request: JoinRequest) -> str:
        """Return why a node may not join; "" if it may."""
        if len(request.public_key) != KEY_CHARS or not request.name:
            return "a node must send its name and its public key"
        if request.role not in SECTIONS:
            return f"role {request.role!r} cannot join; these roles can: {', '.join(SECTIONS)}"
        if not request.is_remote or request.role == "envhub":
            return ""
        hosts = {"learner": self._cfg.learner.advertise or self._cfg.learner.host}
        if request.role == "actor" and self._cfg.envhub.is_started and not self._cfg.envhub.url:
            hosts["envhub"] = self._cfg.envhub.advertise or self._cfg.envhub.host
        closed = [f"{name}.host" for name, host in hosts.items() if is_loopback(host)]
        remedy = " ".join(f"{key}=0.0.0.0" for key in closed)
        return f"other machines cannot reach this run; start it with {remedy}" if closed else ""

    def _enrol(self, request: JoinRequest, is_alive: Callable[[str], bool]) -> Enrolment | Rejected:
        """Return the node's configuration and list of files, or why it is refused."""
        if request.role == "actor" and not request.has_model:
            try:
                self._files = list_shared(Path(self._cfg.model.path), template=self._template())
            except (ConfigError, OSError) as error:
                return Rejected(reason=str(error))
        try:
            self._give_key(request, is_alive)
        except ConfigError as error:
            return Rejected(reason=str(error))
        code = request.commit or f"version {request.product}"
        logger.info("enrolled node name=%s role=%s code=%s", request.name, request.role, code)
        cfg = self._cfg
        envs = {*(task.env for task in self._cfg.tasks), *self._cfg.envhub.envs}
        if request.role == "actor" and not request.has_model:  # Its folder has the run's template.
            cfg = replace(cfg, model=replace(cfg.model, chat_template=""))
        if request.role == "envhub":  # By default a joining hub serves all environments of the run.
            cfg = replace(cfg, envhub=replace(cfg.envhub, envs=sorted(envs)))
        return Enrolment(
            run_name=cfg.run.name,
            config=sections_as_yaml(cfg, SECTIONS[request.role], without=SECRET),
            files=[] if request.has_model or request.role != "actor" else self._files,
            defaults=default_keys(cfg, SECTIONS[request.role]),
        )

    def _give_key(self, request: JoinRequest, is_alive: Callable[[str], bool]) -> None:
        """Bind a name to a key.

        Raises: ConfigError: the name is revoked, or its living holder has another key.
        """
        self._known.refresh()
        identity = self._known.named(request.name)
        if identity is not None and identity.public == request.public_key:
            return
        if identity is not None and identity.is_revoked:
            raise ConfigError(f"the name {request.name!r} is revoked; choose another name")
        if request.role == "learner":
            raise ConfigError("a node of the learner joins with keys/ranks-N.key of the run")
        if identity is not None and is_alive(request.name):
            raise ConfigError(f"{NAME_IN_USE} {request.name!r}")
        add_identity(self._keys, Identity(request.name, request.role, request.public_key))

    def _template(self) -> Path | None:
        """Return the file that a node receives as the chat template of the model."""
        return template_at(self._cfg.model)

    def _part(self, request: FileRequest) -> FilePart | Rejected:
        """Return a part of a listed file. No other file is read."""
        file = next((each for each in self._files if each.name == request.name), None)
        if file is None or not 0 <= request.offset_bytes < max(1, file.num_bytes):
            return Rejected(reason=f"no file {request.name!r} at byte {request.offset_bytes}")
        template = self._template()
        path = Path(self._cfg.model.path) / file.name
        if template is not None and file.name == TEMPLATE:
            path = template
        with path.open("rb") as source:
            source.seek(request.offset_bytes)
            content = source.read(min(PART_BYTES, file.num_bytes - request.offset_bytes))
        return FilePart(name=file.name, offset_bytes=request.offset_bytes, content=content)
