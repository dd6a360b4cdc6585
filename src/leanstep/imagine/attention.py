"""Attention on CUDA: which kernel would run, and that kernel's op."""

import math

import torch
from torch.nn import functional

from leanstep.torch_private.fake import efficient_attention, flash_attention, plain_attention

_FLASH_MULTIPLE = 8
_FLASH_MOST = 256


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash for 16 bits without a mask, else the memory-efficient kernel, else plain ops."""
    if _flash_applies(query, key, value, attn_mask):
        return _flash(query, key, value, dropout_p, is_causal=is_causal, scale=scale)
    if _efficient_applies(query, key, value) and not enable_gqa:
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        return efficient_attention(
            query, key, value, bias, dropout=dropout_p, is_causal=is_causal, scale=scale
        )
    return plain_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _flash_applies(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    head_width = query.shape[-1]
    return (
        mask is None
        and query.dim() == 4
        and _dtypes(query, key, value) <= {torch.float16, torch.bfloat16}
        and value.shape[-1] == head_width <= _FLASH_MOST
    )


def _efficient_applies(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    # Rows are read in pieces of 16 bytes.
    multiple = 16 // query.dtype.itemsize
    return (
        query.dim() == 4
        and len(_dtypes(query, key, value)) == 1
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[-1] % multiple == 0
        and value.shape[-1] % multiple == 0
    )


def _dtypes(*tensors: torch.Tensor) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    *,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    head_width = query.shape[-1]
    missing = -head_width % _FLASH_MULTIPLE
    if missing:
        query, key, value = (functional.pad(t, (0, missing)) for t in (query, key, value))
        scale = scale or 1.0 / math.sqrt(head_width)
    out = flash_attention(query, key, value, dropout=dropout, is_causal=is_causal, scale=scale)
    return out[..., :head_width] if missing else out


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to the scores, seen by every head and row."""
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype)
        mask = torch.where(mask, zero, float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])
