"""The kinds of layers that can be verified: what differs between them is here, and the claims are the same."""

from zoo.layers.kinds import kind_of
from zoo.verify.kinds.conv2d import CONV2D
from zoo.verify.kinds.layer_norm import LAYER_NORM
from zoo.verify.kinds.linear import LINEAR
from zoo.verify.kinds.mlp import MLP
from zoo.verify.kinds.suite import Suite

__all__ = ["EVERY", "SUITES", "Suite", "suite_of"]

SUITES: dict[str, Suite] = {suite.kind: suite for suite in (LINEAR, LAYER_NORM, CONV2D, MLP)}

EVERY = tuple(SUITES)


def suite_of(kind: str) -> Suite:
    """The suite of a kind. ValueError, with the known ones, for no kind."""
    kind_of(kind)
    return SUITES[kind]
