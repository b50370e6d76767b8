"""One file for each rank, made for any t: cut, joined, cut anew, loaded and saved.

A shard's file holds what that rank holds in memory, padding included, and says so in its header: rank, t, and to which
multiple the vocabulary is filled up. What lies where is read from the model's own `sources`; so every way from one form
to another is the same few lines: for each parameter of the target, read the slices of which it is made.

Symbols: V vocabulary, t ranks, r a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from re import fullmatch
from shutil import rmtree

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpcode.checkpoint.files import (
    CheckpointError,
    HuggingFaceFiles,
    SafeFile,
    begin_directory,
    copy_companions,
    dense_shapes,
    new_directory,
    partial_name,
    read_config,
    write_config,
    write_huggingface,
)
from tpcode.comm import all_gather, group_rank, group_size
from tpcode.config import ModelConfig
from tpcode.layers.source import Source
from tpcode.model import ParallelTransformer
from tpcode.shapes import head_groups, require_int

_FILE = r"rank-(\d{5})-of-(\d{5})\.safetensors"
_FORMAT = "tpcode shard 1"


class ShardFiles:
    """The dense parameters of a directory of shards: read as if they were whole, from whichever files hold them.

    Attributes:
        config, bias: what config.json says.
        t: the number of ranks that it was made for.
        vocab_multiple: to which the vocabulary is filled up on each.
        bytes_read: so far.

    Raises:
        CheckpointError: a file is missing, damaged, or of another set; a tensor is missing, foreign, or of a wrong
            shape.
    """

    def __init__(self, directory: Path, group: ProcessGroup | None = None):
        self.config, self.bias = read_config(directory)
        self.directory, self.bytes_read = directory, 0
        self._files = _shard_files(directory)
        self.t = len(self._files)
        self.vocab_multiple = _checked_headers(self._files)
        self.shapes = dense_shapes(self.config, self.bias)
        _require_split(self.config, self.t)
        self._sources = _sources(self.config, self.bias, self.vocab_multiple, group)
        for file in self._files:
            _check_tensors(file, self._sources, self.t)
        self._pieces: dict[str, dict[tuple[int, int], tuple[int, str, int]]] = {name: {} for name in self.shapes}
        for own, source in self._sources.items():
            for rank in range(self.t):
                for piece in source.pieces(rank, self.t):  # of replicas the first is read
                    self._pieces[piece.name].setdefault((piece.start, piece.stop), (rank, own, piece.at))

    def dtype(self, name: str) -> torch.dtype:
        """Of a dense parameter."""
        rank, own, _ = next(iter(self._pieces[name].values()))
        return self._files[rank].dtype(own)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries start to stop along dim of a dense parameter, without padding."""
        shape = list(self.shapes[name])
        shape[dim] = stop - start
        found = torch.empty(shape, dtype=self.dtype(name))
        for (first, last), (rank, own, at) in self._pieces[name].items():
            cut = self._sources[own].dim
            if cut != dim:  # a few rows of what is cut by columns: of every file its columns of them
                part = self._files[rank].read(own, cut, at, at + last - first).narrow(dim, start, stop - start)
                found.narrow(cut, first, last - first).copy_(part)
            elif (low := max(first, start)) < (high := min(last, stop)):
                part = self._files[rank].read(own, dim, at + low - first, at + high - first)
                found.narrow(dim, low - start, high - low).copy_(part)
            else:
                continue
            self.bytes_read += part.nbytes
        return found


def open_checkpoint(directory: str | Path, group: ProcessGroup | None = None) -> HuggingFaceFiles | ShardFiles:
    """The dense parameters of a directory, whichever form it has: `read(name, dim, start, stop)` gives a slice.

    Raises:
        CheckpointError: it is damaged, incomplete, or of something else. All headers are checked, no weight is read.
    """
    directory = Path(directory)
    if any(directory.glob("rank-*.safetensors")):
        return ShardFiles(directory, group)
    return HuggingFaceFiles(directory)


def load(
    directory: str | Path, group: ProcessGroup | None = None, *, dtype: torch.dtype | None = None, **options
) -> ParallelTransformer:
    """A model from a directory, Hugging Face's or of shards, for whatever t. Every rank of the group calls it.

    Each rank reads the slices that it keeps, 1/t of the weights and what is replicated, and has no more in memory than
    these and one slice besides. All names and shapes are checked before the first weight is read.

    Args:
        dtype: of the parameters; None is the files'.
        options: `recompute`, `vocab_multiple`, `core`, `seed`, as `ParallelTransformer` takes them.

    Raises:
        CheckpointError: as `open_checkpoint`; the files have several dtypes, and none is given.
        ValueError: the heads do not split over t ranks; the message has the sizes of t that work.
    """
    reader = open_checkpoint(directory, group)
    _require_split(reader.config, group_size(group))
    model = ParallelTransformer(
        reader.config, group, bias=reader.bias, dtype=dtype or _one_dtype(reader), device="meta", **options
    )
    model.fill(reader.read)
    return model


def save(model: ParallelTransformer, directory: str | Path) -> None:
    """Write a model's shards into a new directory, each rank its own. Every rank of the group calls it.

    The directory gets its name when all files are written: it is there as a whole or not at all. `merge` makes Hugging
    Face's form of it.

    Raises:
        FileExistsError: the directory exists.
        CheckpointError: another rank could not write its file; on every rank, and nothing is left.
    """
    target, rank, t = Path(directory), group_rank(model.group), group_size(model.group)
    partial = partial_name(target)

    def begin():
        if rank == 0:
            begin_directory(target)
            write_config(model.config, model.bias, partial, model.embedding.weight.dtype)

    def write():
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        _write_shard(tensors, partial, rank, t, model.vocab_multiple)

    def publish():
        if rank == 0:
            partial.rename(target)

    try:
        for step in (begin, write, publish):
            _together(step, model.group, model.embedding.weight.device)
    except BaseException as error:
        if rank == 0 and not isinstance(error, FileExistsError):
            rmtree(partial, ignore_errors=True)
        raise


def shard(source: str | Path, target: str | Path, tp: int, *, vocab_multiple: int = 1) -> None:
    """Cut a checkpoint, of either form, for `tp` ranks: a new directory with a file for each. One process does it.

    One rank's shard is in memory at a time. The vocabulary's padding of the source is left behind, and that of the new
    t put on: V = 50,257 filled up to a multiple of 128 on each rank is 50,304 rows at t = 1 and 51,200 at t = 8.

    Raises:
        CheckpointError: as `open_checkpoint`.
        ValueError: the heads do not split over tp ranks; the message has the sizes that work.
        FileExistsError: the target exists.
    """
    _require_one_process()
    reader, tp = open_checkpoint(source), require_int(tp, "tp")
    _require_split(reader.config, tp)
    sources = _sources(reader.config, reader.bias, vocab_multiple)
    like = torch.empty(0, dtype=_one_dtype(reader))
    with new_directory(Path(target)) as partial:
        for rank in range(tp):
            tensors = {name: made_of.shard(reader.read, rank, tp, like) for name, made_of in sources.items()}
            _write_shard(tensors, partial, rank, tp, vocab_multiple)
        write_config(reader.config, reader.bias, partial, like.dtype)
        copy_companions(Path(source), partial)


def merge(source: str | Path, target: str | Path, *, max_file_bytes: int = 5 * 10**9) -> None:
    """Join shards to a new Hugging Face directory, without padding. One process does it.

    Args:
        max_file_bytes: a model that is larger goes into several files with an index. One of them is in memory at a
            time.

    Raises:
        CheckpointError: as `open_checkpoint`; Hugging Face has no such model.
        FileExistsError: the target exists.
    """
    _require_one_process()
    reader = open_checkpoint(source)
    with new_directory(Path(target)) as partial:
        write_huggingface(reader, partial, require_int(max_file_bytes, "max_file_bytes"))
        copy_companions(Path(source), partial)


def reshard(source: str | Path, target: str | Path, tp_from: int, tp_to: int, *, vocab_multiple: int = 1) -> None:
    """Cut shards for `tp_from` ranks anew for `tp_to`. It is what merging and cutting gives, without the whole between.

    Raises:
        CheckpointError: the source is not of shards for tp_from ranks; as `shard`.
        ValueError, FileExistsError: as `shard`.
    """
    _require_one_process()
    reader = open_checkpoint(source)
    found = reader.t if isinstance(reader, ShardFiles) else None
    if found != require_int(tp_from, "tp_from"):
        what = "has no shards" if found is None else f"has shards for {found} ranks"
        raise CheckpointError(f"{source} {what}, and tp_from is {tp_from}")
    shard(source, target, tp_to, vocab_multiple=vocab_multiple)


# ---- the files of one directory -------------------------------------------------------------------------------------


def _write_shard(tensors: dict[str, Tensor], directory: Path, rank: int, t: int, vocab_multiple: int) -> None:
    from safetensors.torch import save_file

    header = {"format": _FORMAT, "rank": str(rank), "t": str(t), "vocab_multiple": str(vocab_multiple)}
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, directory / f"rank-{rank:05}-of-{t:05}.safetensors", header)


def _shard_files(directory: Path) -> list[SafeFile]:
    """All ranks' files, in order."""
    numbers = {}
    for path in directory.glob("rank-*.safetensors"):
        if not (match := fullmatch(_FILE, path.name)):
            raise CheckpointError(f"{path} is no shard's name: rank-00000-of-00002.safetensors is one")
        numbers[path] = int(match[1]), int(match[2])
    sizes = sorted({t for _, t in numbers.values()})
    if len(sizes) > 1:
        raise CheckpointError(f"{directory} has shards of several sets: for {' and '.join(map(str, sizes))} ranks")
    return [SafeFile(directory / f"rank-{rank:05}-of-{sizes[0]:05}.safetensors") for rank in range(sizes[0])]


def _checked_headers(files: list[SafeFile]) -> int:
    """To what multiple the vocabulary is filled up."""
    for rank, file in enumerate(files):
        header = file.metadata
        if header.get("format") != _FORMAT:
            raise CheckpointError(f"{file.path} is no shard of this kind: its format is {header.get('format')!r}")
        if (header.get("rank"), header.get("t")) != (str(rank), str(len(files))):
            held = f"rank {header.get('rank')} of {header.get('t')}"
            raise CheckpointError(f"{file.path} holds the shard of {held}, whatever its name says")
        if header.get("vocab_multiple") != files[0].metadata["vocab_multiple"]:
            raise CheckpointError(f"{file.path} is of another set than {files[0].path.name}: vocab_multiple differs")
    return int(files[0].metadata["vocab_multiple"])


def _check_tensors(file: SafeFile, sources: dict[str, Source], t: int) -> None:
    for name, source in sources.items():
        if name not in file.shapes:
            raise CheckpointError(f"{file.path}: the tensor {name} is missing")
        if file.shapes[name] != source.shard_shape(t):
            found, wanted = list(file.shapes[name]), list(source.shard_shape(t))
            raise CheckpointError(f"{file.path}: {name} is {found}, and must be {wanted} by config.json")
        file.dtype(name)
    for name in file.shapes:
        if name not in sources:
            raise CheckpointError(f"{file.path}: a model of this config has no tensor {name}")


def _sources(
    config: ModelConfig, bias: bool, vocab_multiple: int, group: ProcessGroup | None = None
) -> dict[str, Source]:
    """How each split parameter is made, by a model without values: the same at every t."""
    return ParallelTransformer(config, group, bias=bias, vocab_multiple=vocab_multiple, device="meta").sources


def _require_split(config: ModelConfig, t: int) -> None:
    head_groups(config.heads, config.kv_heads, t)


def _one_dtype(reader) -> torch.dtype:
    dtypes: dict[torch.dtype, str] = {}
    for name in reader.shapes:
        dtypes.setdefault(reader.dtype(name), name)
    if len(dtypes) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise CheckpointError(f"{reader.directory} has several dtypes ({listed}); convert it, or load it with dtype=")
    return next(iter(dtypes))


def _require_one_process() -> None:
    if group_size() > 1:
        raise CheckpointError(
            f"shard, merge and reshard read and write files in one process, and this is one of {group_size()} ranks; "
            "call them before ranks start, or use load and save"
        )


def _together(step: Callable[[], None], group: ProcessGroup | None, device: torch.device) -> None:
    """Run step on every rank; raise on all of them if it fails on one. One all-gather of a byte from each."""
    error = None
    try:
        step()
    except Exception as raised:
        error = raised
    failed = all_gather(torch.tensor([error is not None], device=device), 0, group).nonzero().flatten().tolist()
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"rank {failed[0]} of the group could not write its part; its own error says why")
