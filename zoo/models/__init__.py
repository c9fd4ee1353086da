"""zoo's own models, and the doors to those of torchvision and timm.

Importing this registers zoo's own; the doors (``zoo.models.torchvision``, ``zoo.models.timm``) import their library
only when they are used.
"""

from zoo.models.mlp import MLP
from zoo.models.resnet import ResNet

__all__ = ["MLP", "ResNet"]
