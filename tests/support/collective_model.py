"""What collectives must give: types and reductions, inputs that each rank can make for all ranks, and results."""

from __future__ import annotations

import torch
import torch.distributed as dist

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

COMPLEX = [torch.complex64, torch.complex128]

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]

MOVABLE = [torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, torch.complex32, *COMPLEX, *FP8]

OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    """The reductions that are defined for ``dtype``, except for PREMUL_SUM."""
    if dtype.is_complex:
        return ["SUM", "AVG"]  # torch's functions refuse PRODUCT, though the backend has it
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    if dtype is torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    return list(OPS)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small random values, exact in every type, and never zero where that would hide a product."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    whole = torch.randint(1, 4, shape, generator=generator)
    if dtype.is_complex:
        other = torch.randint(-2, 3, shape, generator=generator)
        return torch.complex(whole.double(), other.double()).to(dtype)
    if dtype.is_floating_point and dtype not in FP8:
        return (whole.double() * torch.randint(0, 2, shape, generator=generator).mul(2).sub(1)).to(dtype)
    return whole.float().to(dtype) if dtype in FP8 else whole.to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements in memory with another layout."""
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim() >= 1:
        wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
        view = wide[..., 0]
        view.copy_(tensor)
        return view
    if layout == "offset":
        padded = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        view = padded[3:].view(tensor.shape)
        view.copy_(tensor)
        return view
    return tensor.clone()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, which can be compared for every type, including NaN."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # A clone, since with size 1 contiguous() keeps strides that cannot be viewed as another type.
    return flat.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The result that the reduction of ``inputs`` must have."""
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = inputs[0].to(wide)
    for tensor in inputs[1:]:
        other = tensor.to(wide)
        if op in ("SUM", "AVG"):
            result = result + other
        elif op == "PRODUCT":
            result = result * other
        elif op in ("MIN", "MAX"):
            result = torch.minimum(result, other) if op == "MIN" else torch.maximum(result, other)
        else:
            result = {"BAND": result & other, "BOR": result | other, "BXOR": result ^ other}[op]
    if op == "AVG":
        size = len(inputs)
        result = (
            result / size
            if dtype.is_floating_point or dtype.is_complex
            else torch.div(result, size, rounding_mode="trunc")
        )
    return result != 0 if dtype is torch.bool else result.to(dtype)
