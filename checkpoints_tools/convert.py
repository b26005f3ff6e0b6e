"""The three conversions: Hugging Face to Megatron-Core, back, and Megatron-Core to other chunks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints_tools.layouts import Cuts, cut_problems
from checkpoints_tools.side_files import HF, copy_side_files, declare_dtype, model_files
from checkpoints_tools.sources import HfSource, MegatronSource, Source, open_hf, open_megatron
from checkpoints_tools.targets import HfTarget, MegatronTarget, Target
from checkpoints_tools.work import FILE_BYTES, PlannedFile, WrittenFile, forget_journal, planned_files, write_files
from gppo_megatron.checkpoint.folder import new_folder
from gppo_megatron.checkpoint.headers import INDEX, SINGLE
from gppo_megatron.checkpoint.manifest import MANIFEST, FileRecord, verify
from gppo_megatron.checkpoint.metadata import COMMON, METADATA, METADATA_JSON
from gppo_megatron.config.architecture import Architecture, read_architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.mapping.pieces import StoredLayout
from gppo_megatron.policy.megatron.stored_layout import stored_layout
from gppo_megatron.policy.megatron.stored_metadata import Box, Object, TensorKind, pickled_metadata

OBJECTS = "__objects.distcp"
HF_FILE_BYTES = 4 * 2**30
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Options:
    """dtype: None keeps each tensor's own. tensor: chunks are cut as for tensor parallelism of this size.

    config: a folder with config.json and the tokenizer, where the source has none. dry: check all, write nothing.
    """

    processes: int = 1
    dtype: torch.dtype | None = None
    tensor: int = 1
    config: Path | None = None
    dry: bool = False
    file_bytes: int | None = None


@dataclass(frozen=True)
class Job:
    """A conversion that was found possible: everything was checked, nothing is written."""

    source: Source
    target: Target
    layout: StoredLayout
    side_files: Path
    files: list[PlannedFile]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def hf_to_megatron(source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
    """Raises ConfigError or CheckpointError; then `target` does not exist."""
    _refuse_kind(source, options, distributed=False)
    architecture = read_architecture(options.config or source)
    layout = stored_layout(architecture)
    _refuse_cuts(architecture, options)
    _run_to_megatron(open_hf(source, layout, architecture), options.config or source, layout, target, options, say)


def reshard(source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
    """Weights alone: what a training checkpoint holds beside them is refused, not dropped."""
    opened = _open_megatron(source, options)
    training = [key for key in opened.source.contents.tensors if key not in opened.keys]
    if training:
        raise CheckpointError(
            f"{source} holds the state of a training run ({training[0]}, ...), which Megatron-Core itself loads at any "
            "layout; to write the weights alone, convert them with megatron-to-hf"
        )
    _refuse_cuts(opened.architecture, options)
    _run_to_megatron(opened.source, opened.side_files, opened.layout, target, options, say)


def megatron_to_hf(source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
    """Raises ConfigError or CheckpointError; then `target` does not exist."""
    opened = _open_megatron(source, options)
    hf_target = HfTarget(opened.source, options.dtype)
    files = planned_files(opened.layout.parameters, hf_target, _hf_name, options.file_bytes or HF_FILE_BYTES)
    job = Job(opened.source, hf_target, opened.layout, opened.side_files, files)
    _announce(job, say)
    if not options.dry:
        _run(job, target, options, say, _finish_hf)


@dataclass(frozen=True)
class _Opened:
    source: MegatronSource
    architecture: Architecture
    layout: StoredLayout
    side_files: Path

    @property
    def keys(self) -> set[str]:
        return {box.key for parameter in self.layout.parameters for box in parameter.boxes}


def _refuse_kind(source: Path, options: Options, distributed: bool) -> None:
    """Raises CheckpointError for a folder that is not there or of the other kind."""
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    is_distributed = (source / METADATA).exists() or (source / METADATA_JSON).exists()
    if is_distributed and not distributed:
        raise CheckpointError(f"{source} is a distributed checkpoint of Megatron-Core; megatron-to-hf converts it")
    if distributed and not is_distributed and (source / "config.json").exists():
        raise CheckpointError(f"{source} is a Hugging Face folder; hf-to-megatron converts it")
    if not distributed and not ((options.config or source) / "config.json").exists():
        raise CheckpointError(f"{options.config or source}: no config.json; name the model's own folder with --config")


def _open_megatron(source: Path, options: Options) -> _Opened:
    _refuse_kind(source, options, distributed=True)
    side_files = options.config or model_files(source)
    architecture = read_architecture(side_files)
    layout = stored_layout(architecture)
    return _Opened(open_megatron(source, layout), architecture, layout, side_files)


def open_source(folder: Path, layout: StoredLayout, architecture: Architecture) -> HfSource | MegatronSource:
    """A model folder of either kind."""
    if (folder / METADATA_JSON).exists() or (folder / METADATA).exists():
        return open_megatron(folder, layout)
    return open_hf(folder, layout, architecture)


def _refuse_cuts(architecture: Architecture, options: Options) -> None:
    problems = cut_problems(architecture, Cuts(tensor=options.tensor))
    if problems:
        raise CheckpointError("; ".join(problems))


def _run_to_megatron(
    source: Source, side_files: Path, layout: StoredLayout, target: Path, options: Options, say: Callable[[str], None]
) -> None:
    megatron_target = MegatronTarget(source, options.tensor, options.dtype)
    files = planned_files(layout.parameters, megatron_target, _megatron_name, options.file_bytes or FILE_BYTES)
    job = Job(source, megatron_target, layout, side_files, files)
    _announce(job, say)
    if not options.dry:
        _run(job, target, options, say, _finish_megatron)


def _announce(job: Job, say: Callable[[str], None]) -> None:
    count = sum(parameter.numel for parameter in job.layout.parameters)
    say(
        f"{count:,} parameters in {len(job.layout.parameters)} tensors of Megatron-Core, {job.bytes / 2**30:.2f} GiB: "
        "names, shapes and dtypes fit config.json"
    )


def _run(
    job: Job,
    target: Path,
    options: Options,
    say: Callable[[str], None],
    finish: Callable[[Path, Job, list[WrittenFile], Options], None],
) -> None:
    hashed: dict[str, FileRecord] = {}
    stamp = f"{type(job.target).__name__} {options.dtype} {options.tensor} {job.source.folder} {job.source.stamp()}"
    place = new_folder(target.parent, target.name, needed_bytes=job.bytes, tracker=None, resumable=True, hashed=hashed)
    with place as folder:
        _refuse_changed(job.source.folder, say)
        written = write_files(folder, job.files, job.target, stamp, options.processes, say)
        hashed.update({file.name: file.record for file in written})
        finish(folder, job, written, options)
        forget_journal(folder)
    say(f"wrote {target}")


def _refuse_changed(source: Path, say: Callable[[str], None]) -> None:
    """A folder that lists what it holds is read once for that: a flipped byte would go unnoticed into the copy."""
    if (source / MANIFEST).exists():
        verify(source)
        say(f"{source}: every file is as it was written")


def _finish_hf(folder: Path, job: Job, written: list[WrittenFile], options: Options) -> None:
    _carry_side_files(job, folder, options)
    if len(job.files) == 1:
        return
    file_of = {name: file.name for file in job.files for parameter in file.parameters for name in parameter.rule.hf}
    index = {"metadata": {"total_size": job.bytes}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _finish_megatron(folder: Path, job: Job, written: list[WrittenFile], options: Options) -> None:
    """`.metadata`, the objects without content, what is common, and last the file that says what this is."""
    kinds = {
        piece.key: TensorKind(piece.whole, options.dtype or job.source.dtype(parameter))
        for parameter in job.layout.parameters
        for piece in parameter.boxes
    }
    boxes = [
        Box(placed.key, placed.offsets, placed.sizes, file.name, placed.offset, placed.length)
        for file in written
        for placed in file.placed
    ]
    objects = []
    with (folder / OBJECTS).open("wb") as stream:
        for key in job.layout.objects:
            begin = stream.tell()
            torch.save([None], stream)
            objects.append(Object(key, OBJECTS, begin, stream.tell() - begin))
    (folder / METADATA).write_bytes(pickled_metadata(kinds, boxes, objects))
    torch.save({"iteration": 0, "checkpoint_version": 3.0}, folder / COMMON)
    _carry_side_files(job, folder / HF, options)
    (folder / METADATA_JSON).write_text(json.dumps(FORMAT), encoding="utf-8")


def _carry_side_files(job: Job, folder: Path, options: Options) -> None:
    """Byte for byte, but for what config.json says of dtypes that have changed."""
    copy_side_files(job.side_files, folder)
    dtype = options.dtype or (torch.float32 if job.source.dequantized else None)
    if dtype is not None:
        declare_dtype(folder / "config.json", str(dtype).removeprefix("torch."))


def _hf_name(place: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{place + 1:05d}-of-{count:05d}.safetensors"


def _megatron_name(place: int, count: int) -> str:
    """As Megatron-Core names them: rank, then number."""
    return f"__0_{place}.distcp"
