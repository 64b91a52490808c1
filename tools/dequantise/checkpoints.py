"""Quantised checkpoints: the files, the method, and the same checkpoint in 16 or 32 bits."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from common.errors import ConfigError
from learner.policy.model_kind import QUANTISED_KEYS, check_kind, quantisation_of
from learner.policy.model_shape import BYTES_OF, check_weights, read_shape, weight_files
from tools.dequantise.record import RECORD, Record, identity_of

if TYPE_CHECKING:
    from tools.dequantise.gguf_files import GgufModel
    from tools.dequantise.tensors import Output

GGUF = "gguf"
# Methods whose weights are dequantised.
METHODS = ("mxfp4", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes")
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PROJECTOR = re.compile(r"^mmproj", re.IGNORECASE)  # The vision part beside a language model.
SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
WEIGHT_INDEX = ".index.json"
CONFIG = "config.json"


class Quantised:
    """A quantised checkpoint on this machine."""

    def __init__(self, path: Path, kind: str, weights: list[Path], dtype: str, *, key: str) -> None:
        """Describe a checkpoint; its tensors are not read yet.

        Args:
            path: absolute path of the file or folder.
            kind: `GGUF`, or one of `METHODS`.
            weights: files with the weights.
            dtype: bfloat16 or float32, of the dequantised weights.
            key: configuration key that names the checkpoint.
        """
        self.path = path
        self.kind = kind
        self.dtype = dtype
        self.key = key
        self._weights = weights

    @property
    def _folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def name(self) -> str:
        """Name of the folder in the cache: the name of the source, and a digest."""
        stem = self.path.name.removesuffix(".gguf")
        settings = {"kind": self.kind, "dtype": self.dtype}
        digest = identity_of(self._small_files(), self._weights, settings)
        return f"{re.sub(r'[^A-Za-z0-9._-]', '_', stem)}-{digest[:16]}"

    def _small_files(self) -> list[Path]:
        """Return the files beside the weights: configuration, tokenizer, template."""
        if not self.path.is_dir():
            return []
        return [
            path
            for path in self.path.iterdir()
            if path.is_file()
            and path.name.endswith(SMALL)
            and not path.name.endswith(WEIGHT_INDEX)
            and path.name != RECORD
        ]

    @property
    def method(self) -> str:
        """Method with its details, as in "gguf (Q4_K)"."""
        if self.kind == GGUF:
            return f"gguf, {self._gguf.types}"
        section = self._section
        form = section.get("format") or section.get("bnb_4bit_quant_type")
        return f"{self.kind}, {form}" if isinstance(form, str) else self.kind

    @property
    def num_bytes(self) -> int:
        """Bytes of the dequantised weights."""
        return sum(each.num_bytes for each in self._outputs)

    @cached_property
    def _gguf(self) -> "GgufModel":
        from tools.dequantise.gguf_files import GgufModel

        with self._refusing():
            return GgufModel(self._weights)

    @cached_property
    def _section(self) -> dict[str, Any]:
        return quantisation_of(json.loads((self._folder / CONFIG).read_text(encoding="utf-8")))

    @cached_property
    def _outputs(self) -> "list[Output]":
        import torch

        from tools.dequantise.layouts import outputs_of
        from tools.dequantise.tensors import stored_tensors

        dtype: torch.dtype = getattr(torch, self.dtype)
        with self._refusing():
            if self.kind == GGUF:
                return self._gguf.outputs(dtype)
            return outputs_of(self.kind, self._section, stored_tensors(self._folder), dtype)

    def _refusing(self) -> "_Refusal":
        return _Refusal(self)

    def check(self) -> None:
        """Check the files before anything is written. Raises: ConfigError: one is damaged."""
        if self.kind != GGUF:
            check_weights(self._folder, key=self.key, shown=str(self.path))
        _ = self._outputs

    def write_small_files(self, folder: Path) -> None:
        """Write the configuration without quantisation, the tokenizer and the template.

        Raises: ConfigError: the checkpoint is no decoder of text, or has no tokenizer.
        """
        import torch

        for path in self._small_files():
            shutil.copyfile(path, folder / path.name)
        if self.kind == GGUF:
            has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
            with self._refusing():
                dtype: torch.dtype = getattr(torch, self.dtype)
                self._gguf.save_small_files(folder, dtype=dtype, has_tokenizer=has_tokenizer)
        else:
            tree = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            plain = {"dtype": self.dtype, **_without_quantisation(tree, self.dtype)}
            (folder / CONFIG).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        check_kind(folder, key=self.key, shown=str(self.path))
        if not any((folder / name).is_file() for name in TOKENIZERS):
            raise ConfigError(f"{self.key}={self.path}: has no tokenizer ({', '.join(TOKENIZERS)})")

    def write_weights(
        self, folder: Path, target: Path, *, note: Callable[[int], None] | None
    ) -> Record:
        """Write the weights; return their record.

        Args:
            target: folder in the cache.
            note: receives the bytes that are written; None writes an outline, without numbers.

        Raises: ConfigError: a file is damaged. OSError: the disk is full.
        """
        from tools.dequantise.tensors import write_weights

        with self._refusing():
            written = write_weights(self._outputs, folder, note=note)
        lines = "".join(f"{name} {each.sha256}\n" for name, each in sorted(written.items()))
        return Record(
            source=str(self.path),
            method=self.method,
            dtype=self.dtype,
            num_bytes=self.num_bytes,
            sha256="" if note is None else sha256(lines.encode()).hexdigest(),
            files={name: each.num_bytes for name, each in written.items()},
            folder=str(target),
        )

    def write_outline(self, folder: Path, target: Path) -> None:
        """Write the sizes of the weights beside the small files of a checkpoint.

        Without files of weights, as before a download, the sizes follow from config.json.
        """
        if self._weights:
            record = self.write_weights(folder, target, note=None)
        else:
            num_bytes = read_shape(folder).num_params * BYTES_OF[self.dtype]
            record = Record(
                source=str(self.path),
                method=self.method,
                dtype=self.dtype,
                num_bytes=num_bytes,
                sha256="",
                files={},
                folder=str(target),
            )
        record = replace(record, needed_bytes=record.num_bytes)
        (folder / RECORD).write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Turns errors of the libraries about a checkpoint into the error of its key."""

    checkpoint: Quantised

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # `tokenizers` raises plain exceptions, and transformers an OSError without a number. One
        # with a number is of the system, such as a full disk.
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, ConfigError) or is_of_system or not isinstance(error, Exception):
            return
        checkpoint = self.checkpoint
        text = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{checkpoint.key}={checkpoint.path}: the weights are quantised ({checkpoint.kind}),"
            f" and they cannot be dequantised: {text}. Copy the files again, or use the checkpoint"
            " of this model in bf16"
        ) from error


def _without_quantisation(tree: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration, or a section of it, without quantisation and with the new dtype."""
    plain: dict[str, Any] = {}
    for name, value in tree.items():
        if name in QUANTISED_KEYS:
            continue
        if name in ("dtype", "torch_dtype"):
            plain[name] = dtype
        elif name.endswith("_config") and isinstance(value, dict):
            plain[name] = _without_quantisation(cast(dict[str, Any], value), dtype)
        else:
            plain[name] = value
    return plain


def find_quantised(path: Path, dtype: str, *, key: str) -> Quantised | None:
    """Return the checkpoint at a path if its weights can be dequantised; None for others.

    Raises: ConfigError: a folder has several GGUF models.
    """
    path = path.absolute()
    if path.is_file() and path.suffix == ".gguf":
        return Quantised(path, GGUF, _parts_of(path), dtype, key=key)
    if not path.is_dir():
        return None
    try:
        plain = weight_files(path)
    except ValueError:  # A damaged index, which other checks report.
        return None
    kind = str(quantisation_of(_config_of(path)).get("quant_method") or "")
    if kind in METHODS:
        return Quantised(path, kind, plain, dtype, key=key)
    if plain:
        return None
    models: dict[str, list[Path]] = {}
    for file in sorted(path.glob("*.gguf")):
        if not PROJECTOR.search(file.name):
            match = PART.fullmatch(file.name)
            models.setdefault(match["stem"] if match else file.stem, []).append(file)
    if len(models) > 1:
        names = ", ".join(files[0].name for files in models.values())
        raise ConfigError(f"{key}={path}: has several models ({names}). Give the path of one file")
    return next((Quantised(path, GGUF, each, dtype, key=key) for each in models.values()), None)


def _parts_of(path: Path) -> list[Path]:
    """Return all parts of a GGUF file, in order."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    return sorted(path.parent.glob(f"{escape(match['stem'])}-*-of-{match['count']}.gguf"))


def _config_of(folder: Path) -> dict[str, Any]:
    """Return config.json, {} if it is missing or damaged, which other checks report."""
    try:
        tree: object = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], tree) if isinstance(tree, dict) else {}
