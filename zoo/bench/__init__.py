"""Is it really faster? Timings of the Linear, alone and in whole models, against eager torch and torch.compile."""

from zoo.bench.cases import CASES, Case, cases_named
from zoo.bench.linear import bench_linear
from zoo.bench.linear_report import LinearReport, LinearRow
from zoo.bench.model import MODELS, bench_model
from zoo.bench.model_report import ModelReport, ModelRow

__all__ = [
    "CASES",
    "MODELS",
    "Case",
    "LinearReport",
    "LinearRow",
    "ModelReport",
    "ModelRow",
    "bench_linear",
    "bench_model",
    "cases_named",
]
