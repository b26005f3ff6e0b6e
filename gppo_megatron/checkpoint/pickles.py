"""Reading pickles without running them: a closed list of names, and nothing real behind any of them.

Every name a pickle asks for is answered by a stand-in from here, so no code but this file's can run. A pickle that
passes holds no name beyond the list, which makes it safe for libraries that unpickle without restriction.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gppo_megatron.errors import CheckpointError

FORCING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
STORAGES = (
    "DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage",
    "CharStorage", "ByteStorage", "BoolStorage", "ComplexFloatStorage", "ComplexDoubleStorage", "UntypedStorage",
)  # fmt: skip


class Standin:
    """Takes any arguments and any state; holds the state as attributes, or as `state` where it is no dict."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class Size(tuple[int, ...]):
    """Stands for torch.Size."""


def _standin(*_: Any) -> Standin:
    return Standin(*_)


def _encode(text: str, encoding: str) -> bytes:
    """Bytes in an old pickle are text in latin1."""
    return text.encode("latin1")


def named(module: str, *names: str, by: Any = Standin) -> dict[tuple[str, str], Any]:
    return {(module, name): by for name in names}


PLAIN: Mapping[tuple[str, str], Any] = {
    **named("collections", "OrderedDict", by=dict),
    **{(module, name): kind for module in ("builtins", "__builtin__") for name, kind in
       {"set": set, "frozenset": frozenset, "bytearray": bytearray, "complex": complex, "slice": slice}.items()},
    **named("_codecs", "encode", by=_encode),
    **{("torch", dtype): dtype for dtype in DTYPES},
    **named("torch", "Size", by=Size),
    **named("torch.serialization", "_get_layout", by=_standin),
}  # fmt: skip
"""What both kinds of pickles of a checkpoint may hold."""

TENSORS: Mapping[tuple[str, str], Any] = {
    **PLAIN,
    **named("torch._utils", "_rebuild_tensor_v2", "_rebuild_parameter", by=_standin),
    **named("torch", *STORAGES),
    **named("torch.storage", "UntypedStorage", "TypedStorage"),
    **named("torch", "device", by=_standin),
    **named("types", "SimpleNamespace"),
    **named("argparse", "Namespace"),
    **named("pathlib", "PosixPath", "PurePosixPath", by=_standin),
    **named("_io", "BytesIO", by=_standin),
    **named("signal", "Signals", by=_standin),
    **named("numpy", "ndarray"),
    **named("numpy", "dtype", by=_standin),
    **named("numpy.dtypes", "UInt32DType"),
    **named("numpy.core.multiarray", "_reconstruct", "scalar", by=_standin),
    **named("numpy._core.multiarray", "_reconstruct", "scalar", by=_standin),
    **named("megatron.core.enums", "ModelType", by=_standin),
    **named("megatron.core.transformer.enums", "AttnBackend", "CudaGraphScope", by=_standin),
    **named("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    **named("megatron.core.rerun_state_machine", "RerunDiagnostic", "RerunMode", "RerunState", by=_standin),
}  # fmt: skip
"""What `torch.save` and Megatron's own list of safe names may put into a file: values, tensors, enumerations."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, allowed: Mapping[tuple[str, str], Any], tensors: bool) -> None:
        super().__init__(stream)
        self._allowed, self._tensors = allowed, tensors

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[(module, name)]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs") from None

    def persistent_load(self, reference: Any) -> Standin:
        if not self._tensors:
            raise pickle.UnpicklingError("it refers to data outside itself")
        return Standin(reference)


def load(stream: BinaryIO, what: str, allowed: Mapping[tuple[str, str], Any], tensors: bool = False) -> Any:
    """Unpickle with nothing but `allowed` names. Raises CheckpointError naming `what` and the first foreign name."""
    try:
        return _Unpickler(stream, allowed, tensors).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{what} is not safe to load, or damaged: {error}") from error
    # A damaged pickle can end in nearly any error of the objects it builds.
    except (EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{what} is damaged ({error!r})") from error


def load_saved(stream: BinaryIO, what: str) -> Any:
    """What `torch.save` wrote, tensors as stand-ins. Raises CheckpointError, also for torch's format before zip."""
    try:
        with zipfile.ZipFile(stream) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1 or any("constants.pkl" in name or "/code/" in name for name in archive.namelist()):
                raise CheckpointError(f"{what} is no file that torch.save writes: {len(pickles)} pickles, or code")
            return load(io.BytesIO(archive.read(pickles[0])), what, TENSORS, tensors=True)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{what} is damaged, or of a format older than torch 1.6 ({error})") from error


def load_file(file: Path, loader: Callable[[BinaryIO, str], Any]) -> Any:
    """Raises CheckpointError where there is no such file."""
    try:
        with file.open("rb") as stream:
            return loader(stream, str(file))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error


def refuse_forced_unpickling(environment: Mapping[str, str] = os.environ) -> None:
    """Raises CheckpointError where the environment makes torch run whatever a checkpoint's pickles ask for."""
    if environment.get(FORCING, "").lower() in ("1", "y", "yes", "true"):
        raise CheckpointError(
            f"{FORCING}={environment[FORCING]} makes torch run any code that a checkpoint holds; unset it first"
        )
