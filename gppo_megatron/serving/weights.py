"""The protocol's three ways to change the weights: a folder, tensors in the body, a broadcast."""

import asyncio
import base64
import io
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gppo_megatron.errors import SyncError
from gppo_megatron.serving.sampler import Sampler
from gppo_megatron.weight_sync.group import Group, broadcast, process_group

Weights = dict[str, torch.Tensor]
GROUP_SECONDS = 120.0


class WeightUpdates:
    """Takes weights in, and hands them to the sampler once they are complete."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._session: Weights | None = None
        self._name = ""
        self._groups: dict[str, tuple[Group, ExitStack]] = {}

    async def from_disk(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        folder, name = Path(body["model_path"]), body.get("weight_version") or "default"
        await self._sampler.change(await asyncio.to_thread(read_folder, folder), name)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def begin(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._session is not None:
            raise ValueError("begin_weight_update() was already called; end_weight_update() must come first")
        self._session = {}
        return {"success": True, "message": "Success."}

    async def end(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session, self._session = self._in_session(), None
        await self._sampler.change(session, self._name)
        return {"success": True, "message": "Success."}

    async def from_tensor(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session = self._in_session()
        session |= named_tensors(base64.b64decode(body["serialized_named_tensors"][0]))
        self._name = body.get("weight_version") or self._name
        return {"success": True, "message": "Success"}

    async def join_group(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        stack, name = ExitStack(), body.get("group_name", "weight_update_group")
        context = process_group(
            body["master_address"],
            body["master_port"],
            body["rank_offset"],
            body["world_size"],
            name,
            body.get("backend", "nccl"),
            GROUP_SECONDS,
        )
        self._groups[name] = (await _in_thread(lambda: stack.enter_context(context)), stack)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def leave_group(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        _, stack = self._groups.pop(body.get("group_name", "weight_update_group"))
        await asyncio.to_thread(stack.close)
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def from_distributed(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session, (group, _) = self._in_session(), self._groups[body.get("group_name", "weight_update_group")]
        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        receive = received_flat if body.get("load_format") == "flattened_bucket" else received_singly
        tensors = await _in_thread(lambda: receive(empty, group))
        session |= zip(body["names"], tensors, strict=True)
        self._name = body.get("weight_version") or self._name
        return {"success": True, "message": "Success"}

    def _in_session(self) -> Weights:
        if self._session is None:
            raise ValueError("weight updates must run between begin_weight_update() and end_weight_update()")
        return self._session


async def _in_thread(work: Callable[[], Any]) -> Any:
    """A lost peer is the asker's matter: it is told, and this server goes on."""
    try:
        return await asyncio.to_thread(work)
    except RuntimeError as error:
        raise SyncError(f"the process group failed: {error}") from error


def received_singly(empty: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Collective: one broadcast a tensor."""
    for tensor in empty:
        broadcast(tensor, group)
    return empty


def received_flat(empty: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Collective: the bytes of all tensors end to end, in one broadcast."""
    flat = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8)
    broadcast(flat, group)
    pieces = torch.split(flat, [tensor.nbytes for tensor in empty])
    return [piece.clone().view(like.dtype).reshape(like.shape) for piece, like in zip(pieces, empty, strict=True)]


def read_folder(folder: Path) -> Weights:
    """Every tensor of a Hugging Face folder. Raises ValueError where it holds none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors")
    weights: Weights = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return weights


class _Unpickler(pickle.Unpickler):
    """Lists of names and tensors, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) in {("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")}:
            return super().find_class(module, name)
        raise ValueError(f"the tensors' pickle asks for {module}.{name}")


def named_tensors(data: bytes) -> Weights:
    """The tensors of a pickled [(name, tensor), ...]. Raises ValueError for any other pickle."""
    try:
        return dict(_Unpickler(io.BytesIO(data)).load())
    except (pickle.UnpicklingError, EOFError, TypeError) as error:
        raise ValueError(f"not a list of named tensors: {error}") from error
