"""Training: a model with stock or custom layers, on real images, with nothing lost where it is broken off.

:func:`train` is one run, described by a :class:`TrainConfig`; :func:`compare` is two, stock and custom.
"""

from zoo.train.comparing import compare
from zoo.train.config import TrainConfig, read_config, write_config
from zoo.train.report import CompareReport, TrainReport
from zoo.train.run import train

__all__ = ["CompareReport", "TrainConfig", "TrainReport", "compare", "read_config", "train", "write_config"]
