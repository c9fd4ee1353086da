"""Residual networks for images: ResNet, ResNeXt and Wide ResNet.

He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385
Xie et al., "Aggregated Residual Transformations", https://arxiv.org/abs/1611.05431
Zagoruyko and Komodakis, "Wide Residual Networks", https://arxiv.org/abs/1605.07146

Modules have the names, order and initialisation that torchvision's have, so weights and random seeds carry over: equal
weights give bit-equal outputs. A bottleneck halves the image in its 3x3 convolution, which is known as version 1.5.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.models.head import make_classifier
from zoo.registry import register_model

__all__ = ["BasicBlock", "Bottleneck", "ResNet"]

NormLayer = Callable[[int], nn.Module]


def _conv3x3(in_chans: int, out_chans: int, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps the image's size but for the stride, whatever the dilation."""
    return nn.Conv2d(
        in_chans, out_chans, 3, stride=stride, padding=dilation, dilation=dilation, groups=groups, bias=False
    )


def _conv1x1(in_chans: int, out_chans: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_chans, out_chans, 1, stride=stride, bias=False)


def _projection(in_chans: int, out_chans: int, stride: int, norm_layer: NormLayer) -> nn.Module | None:
    """What brings a block's input to the shape of its output; None where that is its shape already."""
    if stride == 1 and in_chans == out_chans:
        return None
    return nn.Sequential(_conv1x1(in_chans, out_chans, stride=stride), norm_layer(out_chans))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (N, in_chans, H, W) -> (N, width, H/stride, W/stride)."""

    expansion = 1

    def __init__(
        self,
        in_chans: int,
        width: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        width_per_group: int = 64,
        norm_layer: NormLayer = nn.BatchNorm2d,
    ) -> None:
        if groups != 1 or width_per_group != 64:
            raise ValueError(
                f"groups={groups}, width_per_group={width_per_group}: basic blocks (resnet18, resnet34) have groups=1 "
                "and width_per_group=64 only; take a bottleneck network, such as resnet50"
            )
        if dilation != 1:
            raise ValueError(
                "replace_stride_with_dilation: basic blocks (resnet18, resnet34) are not dilated; "
                "take a bottleneck network, such as resnet50"
            )
        super().__init__()
        self.conv1 = _conv3x3(in_chans, width, stride=stride)
        self.bn1 = norm_layer(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = norm_layer(width)
        self.downsample = _projection(in_chans, width, stride, norm_layer)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: (N, in_chans, H, W) -> (N, 4 * width, H/stride, W/stride).

    The 3x3 convolution works on ``groups`` groups of ``width * width_per_group / 64`` channels.
    """

    expansion = 4

    def __init__(
        self,
        in_chans: int,
        width: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        width_per_group: int = 64,
        norm_layer: NormLayer = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        inner = width * width_per_group // 64 * groups
        outer = width * self.expansion
        self.conv1 = _conv1x1(in_chans, inner)
        self.bn1 = norm_layer(inner)
        self.conv2 = _conv3x3(inner, inner, stride=stride, dilation=dilation, groups=groups)
        self.bn2 = norm_layer(inner)
        self.conv3 = _conv1x1(inner, outer)
        self.bn3 = norm_layer(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(in_chans, outer, stride, norm_layer)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network: images (N, in_chans, H, W) -> logits (N, num_classes).

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: the number of blocks in each of the four stages.
        num_classes: number of logits; 0 leaves the classifier out, and the output is the pooled features.
        in_chans: channels of the input images.
        zero_init_residual: start each block as the identity, by a zero weight in its last norm.
        groups, width_per_group: groups of a bottleneck's 3x3 convolution, and their width in the first stage.
        replace_stride_with_dilation: for each of the last three stages, whether it keeps the image's size and dilates
            its convolutions instead of halving it.
        norm_layer: makes a norm from a number of channels.
        global_pool: "avg", or "" for the features as they are (N, num_features, H/32, W/32), without a classifier.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: NormLayer | None = None,
        global_pool: str = "avg",
    ) -> None:
        super().__init__()
        dilate = [False] * 3 if replace_stride_with_dilation is None else list(replace_stride_with_dilation)
        if len(dilate) != 3:
            raise ValueError(f"replace_stride_with_dilation must hold 3 booleans, one a stage from 2 on, got {dilate}")
        norm_layer = norm_layer or nn.BatchNorm2d
        make = functools.partial(block, groups=groups, width_per_group=width_per_group, norm_layer=norm_layer)
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = 512 * block.expansion
        self.grad_checkpointing = False

        self.conv1 = nn.Conv2d(in_chans, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        chans, dilation = 64, 1
        stages = []
        for width, depth, halve, dilated in zip(
            (64, 128, 256, 512), depths, (False, True, True, True), (False, *dilate), strict=True
        ):
            first_dilation = dilation  # the first block still works on the grid of the stage before
            dilation *= 2 if halve and dilated else 1
            blocks = [make(chans, width, stride=2 if halve and not dilated else 1, dilation=first_dilation)]
            chans = width * block.expansion
            blocks += [make(chans, width, dilation=dilation) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool, self.fc = self._head(num_classes, global_pool)
        self.num_classes, self.global_pool = num_classes, global_pool

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual:
            for residual in itertools.chain(*self._stages()):
                if (weight := getattr(residual.last_norm, "weight", None)) is not None:
                    nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (N, in_chans, H, W) -> features (N, num_features, H/32, W/32)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        recompute = self.grad_checkpointing and torch.is_grad_enabled()
        for stage in self._stages():
            x = _checkpointed(stage, x) if recompute else stage(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (N, num_features, h, w) -> logits (N, num_classes); with ``pre_logits`` what the classifier gets."""
        x = self.avgpool(x)
        if self.global_pool:
            x = torch.flatten(x, 1)
        return x if pre_logits else self.fc(x)

    def get_classifier(self) -> nn.Module:
        """The module that makes the logits; an Identity where ``num_classes`` is 0."""
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a freshly initialised classifier in, or none (0); ``global_pool`` None keeps the pooling as it is."""
        pool = self.global_pool if global_pool is None else global_pool
        like = self.conv1.weight
        avgpool, fc = self._head(num_classes, pool)
        self.avgpool, self.fc = avgpool.train(self.training), fc.to(like.device, like.dtype).train(self.training)
        self.num_classes, self.global_pool = num_classes, pool

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input for backward and compute the rest again there: less memory, more time."""
        self.grad_checkpointing = enable

    def _stages(self) -> tuple[nn.Sequential, ...]:
        return self.layer1, self.layer2, self.layer3, self.layer4

    def _head(self, num_classes: int, global_pool: str) -> tuple[nn.Module, nn.Module]:
        if global_pool not in ("avg", ""):
            raise ValueError(f"global_pool={global_pool!r}: expected 'avg', or '' for features that are not pooled")
        if num_classes and not global_pool:
            raise ValueError(
                f"global_pool='' leaves a classifier of {num_classes} classes no vector to work on; "
                "pass num_classes=0 with it"
            )
        pool = nn.AdaptiveAvgPool2d((1, 1)) if global_pool else nn.Identity()
        return pool, make_classifier(self.num_features, num_classes)


def _checkpointed(blocks: nn.Sequential, x: Tensor) -> Tensor:
    for block in blocks:
        if torch.compiler.is_compiling():  # compiled, the statistics are updated outside of what is computed again
            x = checkpoint(block, x, use_reentrant=False)
        else:
            contexts = functools.partial(_contexts, block)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return contextlib.nullcontext(), _lent_buffers(block)


@contextlib.contextmanager
def _lent_buffers(block: nn.Module) -> Iterator[None]:
    """While a block is computed again, its norms count the batch into copies: it is in their statistics already."""
    kept = [(m, name, buffer) for m in block.modules() for name, buffer in m.named_buffers(recurse=False)]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)


def _register(name: str, block: type[BasicBlock | Bottleneck], depths: Sequence[int], **fixed: Any) -> None:
    register_model(name)(functools.partial(ResNet, block, depths, **fixed))


_register("resnet18", BasicBlock, (2, 2, 2, 2))
_register("resnet34", BasicBlock, (3, 4, 6, 3))
_register("resnet50", Bottleneck, (3, 4, 6, 3))
_register("resnet101", Bottleneck, (3, 4, 23, 3))
_register("resnet152", Bottleneck, (3, 8, 36, 3))
_register("resnext50_32x4d", Bottleneck, (3, 4, 6, 3), groups=32, width_per_group=4)
_register("resnext101_32x8d", Bottleneck, (3, 4, 23, 3), groups=32, width_per_group=8)
_register("resnext101_64x4d", Bottleneck, (3, 4, 23, 3), groups=64, width_per_group=4)
_register("wide_resnet50_2", Bottleneck, (3, 4, 6, 3), width_per_group=128)
_register("wide_resnet101_2", Bottleneck, (3, 4, 23, 3), width_per_group=128)
