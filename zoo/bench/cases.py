"""The Linears of real models that are timed, as data: at batch 64, but where the name says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["CASES", "Case", "cases_named"]


@dataclass(frozen=True)
class Case:
    """One Linear: x (M, K), weight (N, K), bias (N) or none, and the activation on its result."""

    name: str
    M: int
    K: int
    N: int
    activation: str | None = None
    """As :func:`zoo.ops.linear` takes it."""
    bias: bool = True
    quick: bool = False
    """Whether a quick run has it: small enough for a CPU."""

    def flops(self, *, backward: bool) -> int:
        """Of the matrix products: one of 2 M N K forward, two more for the gradients of x and weight."""
        return 2 * self.M * self.N * self.K * (3 if backward else 1)

    def elements(self, *, backward: bool) -> int:
        """How many values must be read and written: each operand and each result once."""
        forward = self.M * self.K + self.N * self.K + self.M * self.N + (self.N if self.bias else 0)
        return forward * (2 if backward else 1)


CASES: tuple[Case, ...] = (
    Case("vit_b/qkv", 12608, 768, 2304),
    Case("vit_b/proj", 12608, 768, 768),
    Case("vit_b/fc1", 12608, 768, 3072, "gelu"),
    Case("vit_b/fc2", 12608, 3072, 768),
    Case("vit_b/head", 64, 768, 1000, quick=True),
    Case("convnext_t/stage1_fc1", 200704, 96, 384, "gelu"),
    Case("convnext_t/stage1_fc2", 200704, 384, 96),
    Case("convnext_t/stage4_fc1", 3136, 768, 3072, "gelu"),
    Case("convnext_t/stage4_fc2", 3136, 3072, 768),
    Case("mixer_b/tokens_fc1", 49152, 196, 384, "gelu"),
    Case("mixer_b/channels_fc1", 12544, 768, 3072, "gelu"),
    Case("swin_t/stage1_qkv", 200704, 96, 288),
    Case("resnet50/fc_b1", 1, 2048, 1000, quick=True),
    Case("resnet50/fc_b64", 64, 2048, 1000, quick=True),
    Case("resnet50/fc_b256", 256, 2048, 1000),
    Case("resnet18/fc_b1", 1, 512, 1000),
    Case("resnet18/fc_b64", 64, 512, 1000),
    Case("resnet18/fc_b256", 256, 512, 1000),
    Case("mnist/fc1", 64, 784, 256, "relu", quick=True),
    Case("mnist/fc2", 64, 256, 256, "relu", quick=True),
    Case("mnist/fc3", 64, 256, 10, quick=True),
    Case("square/4096", 4096, 4096, 4096),
    Case("square/8192", 8192, 8192, 8192),
    Case("vector/4096", 1, 4096, 4096),
)


def cases_named(globs: Iterable[str]) -> tuple[Case, ...]:
    """The cases whose names match any of the globs, in the table's order. ValueError for a glob that matches none."""
    globs = tuple(globs)
    for glob in globs:
        if not any(fnmatchcase(case.name, glob) for case in CASES):
            names = ", ".join(case.name for case in CASES)
            raise ValueError(f"case {glob!r}: matches none; expected a name or glob such as 'vit_b/*', of {names}")
    return tuple(case for case in CASES if any(fnmatchcase(case.name, glob) for glob in globs))
