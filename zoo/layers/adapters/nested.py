"""Nested tensors in torch's transformer layers, which outside of their fused fast path take none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["padded_inside", "stock_where_nested"]


def stock_where_nested(forward: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of MultiheadAttention: nested sequences stay with torch's kernel, and coverage will say so."""

    @functools.wraps(forward)
    def attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (stock if query.is_nested else forward)(self, query, key, value, *args, **kwargs)

    return attention


def padded_inside(forward: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of TransformerEncoderLayer: of nested sequences, such as TransformerEncoder makes of padded ones, to
    nested ones, padded in between."""

    @functools.wraps(forward)
    def layer(self: Any, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = [value for value in (*args, *kwargs.values()) if value is not None and value is not False]
        if not src.is_nested or src.layout is not torch.strided or options:
            return forward(self, src, *args, **kwargs)
        lengths = [len(sequence) for sequence in src.unbind()]
        padded = src.to_padded_tensor(0.0)
        places = torch.arange(padded.shape[1], device=padded.device)
        padding = places >= torch.tensor(lengths, device=padded.device)[:, None]
        output = forward(self, padded, src_key_padding_mask=padding)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(output, lengths, strict=True)])

    return layer
