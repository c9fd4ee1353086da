"""Is it really faster? Timings of the Linear, alone and in whole models, against eager torch and torch.compile."""

from zoo.bench.cases import CASES, Case, cases_named
from zoo.bench.linear import bench_linear
from zoo.bench.linear_report import LinearReport, LinearRow
from zoo.bench.model import MODELS, bench_model
from zoo.bench.model_report import ModelReport, ModelRow
from zoo.bench.serving import bench_serving
from zoo.bench.serving_report import ServeReport, ServeRow

__all__ = [
    "CASES",
    "MODELS",
    "Case",
    "LinearReport",
    "LinearRow",
    "ModelReport",
    "ModelRow",
    "ServeReport",
    "ServeRow",
    "bench_linear",
    "bench_model",
    "bench_serving",
    "cases_named",
]
