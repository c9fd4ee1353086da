"""zoo: the proving ground for custom layers.

It puts a layer into real models (its own ResNets and MLPs, and every model of torchvision and timm), proves that it
computes the same, forward and backward, and brings the first such layer: a Linear on its own C++/CUDA operator.

    model = zoo.create("resnet50", custom_linear=True)
    zoo.coverage(model, images)              # what really ran
    zoo.parity(model, stock, images, gradients=True).raise_for_failure()
"""

from zoo import layers, ops
from zoo.checkpoint import load, load_checkpoint, save_checkpoint
from zoo.coverage import CoverageReport, coverage
from zoo.factory import create
from zoo.layers import list_layers, register_adapter, register_layer
from zoo.parity import ParityReport, parity
from zoo.registry import list_models, register_model
from zoo.report import CheckFailed
from zoo.state_dict import StateDictReport, check_state_dict
from zoo.swap import SwapReport, patch, unpatch
from zoo.verify import VerifyReport, verify
from zoo.version import __version__

__all__ = [
    "CheckFailed",
    "CoverageReport",
    "ParityReport",
    "StateDictReport",
    "SwapReport",
    "VerifyReport",
    "__version__",
    "check_state_dict",
    "coverage",
    "create",
    "layers",
    "list_layers",
    "list_models",
    "load",
    "load_checkpoint",
    "ops",
    "parity",
    "patch",
    "register_adapter",
    "register_layer",
    "register_model",
    "save_checkpoint",
    "unpatch",
    "verify",
]
