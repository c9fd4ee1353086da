"""A verdict's JSON made up, with everything that may be in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zoo.machine import Machine
from zoo.verify import Verdict, VerifyReport
from zoo.verify.outcome import TensorError
from zoo.verify.timing.report import TimingReport, TimingRow

MACHINE = Machine("AMD EPYC", None, "2.10.0", None, "0.1.0", "3.12.1", 2, "2026-01-02T03:04:05+00:00")
ROW = TimingRow(
    "vit_b/head",
    64,
    768,
    1000,
    "float32",
    "forward",
    "cold",
    "eager",
    "FASTER",
    "",
    100.0,
    125.0,
    1.25,
    1.22,
    1.28,
    0.01,
    0.02,
    (1.24, 1.26),
    200,
    3,
    {"perf_counter": 100.0, "process_time": 99.0, "parent": 160.0},
)
TIMING = TimingReport(
    "full",
    "",
    5,
    5,
    40,
    ("perf_counter", "process_time", "parent"),
    ({"load": "0.10 of 2 processors"},) * 6,
    (
        ROW,
        replace(ROW, state="warm", verdict="INCONCLUSIVE", reason="the smallest effect", speedup=1.0, speedup_low=0.95),
        replace(
            ROW,
            peer="compiled",
            verdict="SUSPECT",
            reason="clocks disagree: <b>much</b>",
            speedup=40.0,
            speedup_high=50.0,
        ),
        TimingRow("x", 1, 1, 1, "float32", "forward+backward", "cold", "eager", "UNTIMED", "no backward"),
    ),
)
REPORT = VerifyReport(
    "hostile:<script>alert(1)</script>",
    "linear",
    "hostile.py",
    "0" * 64,
    {"_C.abi3.so": "1" * 64},
    MACHINE,
    7,
    "zoo verify 'hostile:<script>alert(1)</script>' --timing",
    (
        Verdict("build", "it is built", "pass", "", 0.2),
        Verdict("values", "outputs are right", "pass", "", 1.5, 2e-7, 1e-7, 4e-7, "(64, 784)->256 output"),
        Verdict(
            "strides", "any strides", "fail", "</td><script>alert(2)</script> is wrong", 10.0, 0.5, 1e-7, 2e-7, "x"
        ),
        Verdict(
            "model-gradients@mlp",
            "every parameter's gradient holds",
            "pass",
            *("", 3.0, 2e-6, 1e-6, 3e-6, "blocks.0.<fc1>.weight"),
            (TensorError("blocks.0.<fc1>.weight", 2e-6, 1e-6, 3e-6), TensorError("head.bias", 0.0, 1e-7, 2e-7)),
        ),
        Verdict("vmap", "vmap gives the same", "refused", "NotImplementedError: no", 0.1),
        Verdict("device", "other devices", "untested", "no GPU here"),
    ),
    timing=TIMING,
)


def document() -> dict[str, Any]:
    return REPORT.to_dict()
