"""A multilayer perceptron for images or feature vectors: 784-256-256-10 unless told otherwise.

Its modules stand where those of ``torchvision.ops.MLP`` of the same widths stand, and are initialised in the same
order, so weights and random seeds carry over both ways.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.models.head import make_classifier
from zoo.naming import unknown_name
from zoo.registry import register_model

__all__ = ["MLP"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": functools.partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
}


@register_model("mlp")
class MLP(nn.Sequential):
    """Linear, activation and dropout for each hidden layer, and a last Linear: the classifier.

    Input: feature vectors (..., in_features), or images (N, C, H, W) or (N, H, W) of in_features values each.
    Output: logits (..., num_classes), of images (N, num_classes). Dropout acts on the hidden layers, never on the
    logits.

    Args:
        in_features: values of one input.
        hidden: width of each hidden layer; none makes it a linear classifier.
        num_classes: number of logits; 0 leaves the classifier out, and the output is the last hidden layer's.
        activation: "relu", "gelu" (exact), "gelu_tanh" or "silu".
        dropout: probability of dropping a hidden value in training.
    """

    def __init__(
        self,
        *,
        in_features: int = 784,
        hidden: Sequence[int] = (256, 256),
        num_classes: int = 10,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise unknown_name("activation", activation, ACTIVATIONS)
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), ACTIVATIONS[activation](), nn.Dropout(dropout)]
        super().__init__(*layers, make_classifier(widths[-1], num_classes))
        self.in_features = in_features
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = widths[-1]
        self.grad_checkpointing = False

    def forward(self, input: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(input))

    def forward_features(self, x: Tensor) -> Tensor:
        """Inputs -> what the last hidden layer gives, (..., num_features)."""
        x, end = self._vectors(x), len(self) - 1
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return self._in_a_row(x, 0, end)
        for first in range(0, end, 3):
            x = checkpoint(self._in_a_row, x, first, first + 3, use_reentrant=False)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (..., num_features) -> logits (..., num_classes); with ``pre_logits`` the features themselves."""
        return x if pre_logits else self[-1](x)

    def get_classifier(self) -> nn.Module:
        """The module that makes the logits; an Identity where ``num_classes`` is 0."""
        return self[-1]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a freshly initialised classifier in, or none (0). There is nothing to pool: leave ``global_pool`` out."""
        if global_pool is not None:
            raise ValueError(f"global_pool={global_pool!r}: an MLP has no pooling; leave it out")
        fresh = make_classifier(self.num_features, num_classes).train(self.training)
        like = next(self.parameters(), None)
        self[-1] = fresh if like is None else fresh.to(like.device, like.dtype)
        self.num_classes = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each hidden layer's input for backward and compute the rest again there."""
        self.grad_checkpointing = enable

    def _in_a_row(self, x: Tensor, first: int, end: int) -> Tensor:
        for index in range(first, end):
            x = self[index](x)
        return x

    def _vectors(self, x: Tensor) -> Tensor:
        image = x.dim() == 4  # even where its last side happens to be in_features long
        if not image and x.shape[-1:] == (self.in_features,):
            return x
        if x.dim() > 1 and math.prod(x.shape[1:]) == self.in_features:
            return x.flatten(1)
        raise ValueError(
            f"mlp: got an input of shape {tuple(x.shape)}, expected (..., {self.in_features}) or images (N, C, H, W) "
            f"with C*H*W = {self.in_features}; resize the images or create the model with in_features="
            f"{math.prod(x.shape[1:]) if x.dim() > 1 else x.numel()}"
        )
