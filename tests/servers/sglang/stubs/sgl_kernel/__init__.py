"""Stands in for SGLang's kernels, compiled for CUDA alone: every name can be imported, none can be called."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels")

    return missing
