"""Linear layers: the seam for weight precision. Legend: T rows, K inputs, N outputs.

On a CPU with kernels, weights are repacked once and a row's result does not depend, bit for bit, on the rows that come
with it; elsewhere `torch.nn.functional.linear` runs. Not a torch.nn.Module: the engine never trains (train/ does).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outrider.native import library

_PANEL = 32
_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}


def kernels_for(tensor: Tensor) -> ctypes.CDLL | None:
    """The C kernels if they can take this tensor's device and type, else None."""
    return library() if tensor.device.type == "cpu" and tensor.dtype in _SUFFIX else None


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Keep torch to one thread for a while, if the kernels are there.

    Between the kernels its own threads would spin against theirs: each operation that wakes them costs milliseconds.
    """
    before = torch.get_num_threads()
    if library() is None or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kernel(lib: ctypes.CDLL, name: str, tensor: Tensor) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The variant of a kernel for this tensor's type."""
    return getattr(lib, f"{name}_{_SUFFIX[tensor.dtype]}")


class Linear:
    """y = x W^T + b for weights [N, K]. The packed copy replaces the given weights, so memory is held once."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.float().contiguous()
        self.dtype = weight.dtype
        lib = kernels_for(weight) if weight.shape[1] % 2 == 0 else None
        self._kernel = None if lib is None else kernel(lib, "linear", weight)
        if lib is None:
            self.weight = weight
            return
        weight = weight.contiguous()
        self.weight = torch.empty(-(-self.out_features // _PANEL) * _PANEL * self.in_features, dtype=weight.dtype)
        kernel(lib, "pack_linear", weight)(
            weight.data_ptr(), self.out_features, self.in_features, self.weight.data_ptr()
        )
        self._weight_at = self.weight.data_ptr()
        self._bias_at = None if self.bias is None else self.bias.data_ptr()

    def rows(self) -> Tensor:
        """The weights as they were given, [N, K]; a copy where they are packed."""
        if self._kernel is None:
            return self.weight
        pair = 2 if self.dtype == torch.bfloat16 else 1
        panels = self.weight.view(-1, self.in_features // pair, _PANEL, pair)
        return panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def __call__(self, x: Tensor, *, wide: bool = False) -> Tensor:
        """x [T, K] contiguous -> [T, N] in the weights' type, or unrounded float32 if `wide`."""
        if self._kernel is None:
            return reference_linear(x, self.weight, self.bias, wide=wide)
        rows, width = x.shape
        y = torch.empty(rows, self.out_features, dtype=torch.float32 if wide else self.dtype)
        self._kernel(
            x.data_ptr(), width, self._weight_at, self._bias_at, rows, self.out_features, width, y.data_ptr(), wide
        )
        return y


def fused_linear(tensors: Mapping[str, Tensor], prefix: str, names: Sequence[str]) -> Linear:
    """One product in place of several that read the same input: `names` of the tensors under a prefix, in order."""
    weights = [tensors[f"{prefix}{name}.weight"] for name in names]
    biases = [tensors.get(f"{prefix}{name}.bias") for name in names]
    given = [bias for bias in biases if bias is not None]
    return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(given) if given else None)


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """The same in plain PyTorch, for devices without the kernels and for tests."""
    y = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(weight.dtype))
    return y.float() if wide else y
