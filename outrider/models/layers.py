"""The small layers between matrix products: RMS norm with the residual add, gated activations, rotary tables.

Each has a plain PyTorch reference beside the C kernel; both round to the model's type in the same places. Legend:
T rows, D hidden width. Widths are multiples of 16 where kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.models.arch import RopeScaling
from outrider.models.linear import kernel, kernels_for

_LANES = 16


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """table[rows] for table [n, D] and rows [T] int64. torch's own would wake its thread pool against the kernels'."""
    lib = kernels_for(table)
    if lib is None:
        return table[rows]
    out = torch.empty(len(rows), table.shape[1], dtype=table.dtype)
    row_bytes = table.shape[1] * table.element_size()
    lib.gather_rows(table.data_ptr(), row_bytes, rows.data_ptr(), len(rows), out.data_ptr())
    return out


def row_writer(table: Tensor) -> Callable[[Tensor, Tensor], None]:
    """What writes table[rows] = values, for table [n, D], rows [T] int32, no row twice, and values [T, D] contiguous.

    All but the call itself is done here, once for a table that is written in every step.
    """
    lib = kernels_for(table)
    if lib is None:
        return lambda rows, values: table.__setitem__(rows.long(), values)
    scatter, at, row_bytes = lib.scatter_rows, table.data_ptr(), table.shape[1] * table.element_size()

    def write(rows: Tensor, values: Tensor) -> None:
        scatter(at, row_bytes, rows.data_ptr(), len(rows), values.data_ptr())

    return write


class RMSNorm:
    """x / rms(x) * weight over the last axis, computed in float32. Source: Zhang and Sennrich, arXiv:1910.07467.

    `offset` is added to the weights that were given: some files store what they differ from 1.
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
        self.weight, self.eps = weight.float().add(offset).contiguous(), eps
        lib = kernels_for(weight) if weight.shape[0] % _LANES == 0 else None
        self._kernel = None if lib is None else kernel(lib, "add_rms_norm", weight)
        self._weight_at = self.weight.data_ptr()

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place (both [T, D]), then give the normed sum [T, D]."""
        if self._kernel is None:
            if delta is not None:
                residual += delta
            return reference_rms_norm(residual, self.weight, self.eps)
        out = torch.empty_like(residual)
        rows, width = residual.shape
        delta_at = None if delta is None else delta.data_ptr()
        self._kernel(residual.data_ptr(), delta_at, self._weight_at, self.eps, rows, width, out.data_ptr())
        return out


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in plain PyTorch; weight float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 D], gate first -> [T, D]."""
    return _gated("silu_mul", reference_silu_mul, gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up for gate_up [T, 2 D], gate first -> [T, D]; GELU in its tanh form, arXiv:1606.08415."""
    return _gated("gelu_mul", reference_gelu_mul, gate_up)


def _gated(name: str, reference: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    lib = kernels_for(gate_up) if width % _LANES == 0 else None
    if lib is None:
        return reference(gate_up)
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    kernel(lib, name, gate_up)(gate_up.data_ptr(), rows, width, out.data_ptr())
    return out


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    """Gated SiLU in plain PyTorch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def reference_gelu_mul(gate_up: Tensor) -> Tensor:
    """Gated GELU in plain PyTorch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def rope_tables(head_dim: int, max_len: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_len, head_dim / 2], float32, for positions 0 to max_len - 1.

    Source: Su et al., arXiv:2104.09864; the llama3 frequency scaling as in Llama 3.1's release.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        inverse = _scaled(inverse, scaling)
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * inverse[None, :]
    return angles.cos().float(), angles.sin().float()


def _scaled(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "proportional":
        turning = torch.arange(len(inverse)) < int(scaling.rotated * len(inverse))
        return inverse * turning / scaling.factor
    # llama3: long wavelengths are stretched by the factor, short ones kept, a smooth ramp between.
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    low, high = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    ramp = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    middle = (1 - ramp) * inverse / scaling.factor + ramp * inverse
    return torch.where(wavelength > low, inverse / scaling.factor, torch.where(wavelength < high, inverse, middle))
