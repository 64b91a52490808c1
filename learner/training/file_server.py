"""File service of rank 0's node for the ranks of other nodes."""

from pathlib import Path

from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from common.wire.rank_messages import FileOp, RankFile, RankFileAnswer


class FileServer:
    """Reads and writes files of the run's models and checkpoints for the ranks of other nodes."""

    def __init__(self, cfg: RunConfig, run_dir: RunDir) -> None:
        """Serve the models of `cfg`, and the checkpoints of the run, which may be written."""
        models = (cfg.model.path, cfg.algorithm.reference_path, cfg.learner.critic.path)
        self._written = run_dir.checkpoints.resolve()
        self._read = [self._written, *(Path(path).resolve() for path in models if path)]

    def answer(self, request: RankFile) -> RankFileAnswer:
        """Return the answer to a request; its error names a forbidden or a failed operation."""
        number = request.number
        path = Path(request.path).resolve()
        roots = [self._written] if request.op is FileOp.WRITE else self._read
        if not any(path.is_relative_to(root) for root in roots):
            text = f"{request.op} is not allowed outside of the run's models and checkpoints"
            return RankFileAnswer(number=number, error=text)
        try:
            match request.op:
                case FileOp.LIST:
                    found = (each for each in path.rglob("*") if each.is_file())
                    names = sorted(str(each.relative_to(path)) for each in found)
                    return RankFileAnswer(number=number, names=names)
                case FileOp.READ:
                    with path.open("rb", buffering=0) as file:
                        file.seek(request.offset_bytes)
                        content = file.read(request.num_bytes)
                    return RankFileAnswer(number=number, content=content)
                case FileOp.WRITE:
                    mode = "r+b" if request.offset_bytes else "wb"
                    with path.open(mode, buffering=0) as file:
                        file.seek(request.offset_bytes)
                        file.write(request.content)
                    return RankFileAnswer(number=number)
        except OSError as error:
            return RankFileAnswer(number=number, error=f"{error}")
