"""Counts the FLOPs of what runs, by torch's formulas and some that torch lacks.

torch's own FlopCounterMode counts nothing for matrix-vector products, attention on the CPU, the encoder's fast path and
LSTMs, which would overstate the share of everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopCounter"]

_aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Inside, ``total`` grows by the FLOPs of what this thread runs: 2 M N K a matrix product."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return NotImplemented
        packet = func._overloadpacket
        formula = flop_registry.get(packet) or _FORMULAS.get(packet)
        if formula is None and func.namespace == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        output = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=output)
        return output


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores of (*, L, E) with (*, S, E), and their product with (*, S, V)."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _self_attention(x: Tensor, *weights: Tensor) -> int:
    """Attention of (B, L, E) to itself, and the products of each of its rows with the weights.

    Nested, the members of the batch have lengths of their own.
    """
    lengths = [len(member) for member in x.unbind()]
    products = sum(2 * weight.numel() for weight in weights)
    return sum(length * (products + 4 * length * x.size(-1)) for length in lengths)


def _encoder_layer(*args: Any, **_: Any) -> int:
    src, qkv, projection, first, second = (args[i] for i in (0, 3, 5, 14, 16))
    return _self_attention(src, qkv, projection, first, second)


def _multi_head_attention(*args: Any, **_: Any) -> int:
    query, qkv, projection = (args[i] for i in (0, 5, 7))
    return _self_attention(query, qkv, projection)


def _vector_product(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _recurrent(input: Tensor, *weights: Any, **_: Any) -> int:
    matrices = weights[0] if isinstance(weights[0], (list, tuple)) else weights[:2]
    return 2 * math.prod(input.shape[:-1]) * sum(w.numel() for w in matrices if w.dim() == 2)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.mv: _vector_product,
    _aten.dot: _vector_product,
    _aten.addmv: lambda _, matrix, vector, **__: _vector_product(matrix, vector),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
    _aten._native_multi_head_attention: _multi_head_attention,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._cudnn_rnn: _recurrent,
}
