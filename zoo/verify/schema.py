"""The JSON of a verdict, field by field: the one place that says what is in it.

The number grows when a field goes or changes its meaning, or when a reader must know the new ones; :data:`FIELDS` has
every key that may be there. Numbers that JSON cannot hold are the texts "nan", "inf" and "-inf".

1. Claims.
2. Errors of claims, hashes of libraries, and timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["FIELDS", "SCHEMA", "paths", "unknown"]

SCHEMA = 2

FIELDS: dict[str, str] = {
    "ok": "whether the run is complete, no claim fails, the values are right, and no time is to be doubted",
    "schema": "the number of this schema",
    "target": "the layer, as it was asked for",
    "kind": "the kind of layer",
    "source_file": "the name of the file that defines the layer, or null",
    "source_sha256": "of that file, or null",
    "against": "what it was compared with, or null for the stock layer",
    "libraries": "an object: the name of each compiled library that may do the layer's work -> its sha256",
    "libraries.*": "sha256",
    "device": "the name of the GPU, or of the CPU",
    "driver": "NVIDIA's, or null",
    "torch": "its version",
    "cuda": "that torch was built with, or null",
    "zoo": "its version",
    "python": "its version",
    "threads": "of torch on the CPU",
    "date": "UTC, when the run began",
    "seed": "of weights, inputs and orders",
    "command": "that reproduces the run",
    "complete": "false where the run was cut off",
    "counts": "an object: status -> how many claims have it",
    "counts.*": "a number",
    "verdicts": "an array, one for each claim",
    "verdicts[].claim": "its name",
    "verdicts[].says": "what is claimed, in words",
    "verdicts[].status": '"pass", "fail", "refused" (a clear error) or "untested" (one that was not reached, too)',
    "verdicts[].reason": "why it did not pass; empty for a pass",
    "verdicts[].seconds": "that its check took",
    "verdicts[].error": "relative, against float64, of the tensor nearest to its limit; null where none is compared",
    "verdicts[].stock_error": "the stock layer's of the same tensor, or null",
    "verdicts[].error_limit": "what the error may be, or null",
    "verdicts[].error_at": "the tensor",
    "verdicts[].tensors": "an array, of a claim about a model: its tensors nearest to their limits, or over them",
    "verdicts[].tensors[].name": "the output's or the parameter's",
    "verdicts[].tensors[].error": "relative, against float64",
    "verdicts[].tensors[].stock_error": "the stock model's",
    "verdicts[].tensors[].limit": "what it may be",
    "timing": "null where nothing was timed, or an object",
    "timing.ok": "whether every time can be believed and all processes have run",
    "timing.form": '"quick" or "full"',
    "timing.note": "what the form does not show",
    "timing.processes": "fresh processes that have run",
    "timing.planned": "how many there are to be",
    "timing.blocks": "of each measurement in each process, fixed beforehand",
    "timing.clocks": "the names of the three clocks",
    "timing.conditions": "an array of objects: the device before each process and after the last, as it tells it",
    "timing.conditions[].*": "text with its unit",
    "timing.notes": "an array: what could not be done, as a third clock",
    "timing.counts": "an object: verdict -> how many rows have it",
    "timing.counts.*": "a number",
    "timing.rows": "an array, one for each measurement and peer",
    "timing.rows[].case": "the model's layer whose shape it is",
    "timing.rows[].M": "rows of the input; of a convolution pixels of the output",
    "timing.rows[].K": "its features; of a convolution the taps of a filter",
    "timing.rows[].N": "features, or channels, of the output",
    "timing.rows[].dtype": "as float32",
    "timing.rows[].pass": '"forward" or "forward+backward"',
    "timing.rows[].state": 'of the caches: "cold" or "warm"',
    "timing.rows[].peer": 'the stock layer: "eager" or "compiled"',
    "timing.rows[].verdict": '"FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "SUSPECT", "UNTIMED" or "FAILED"',
    "timing.rows[].reason": "of a verdict that needs one",
    "timing.rows[].layer_us": "the median, microseconds a call; null, as what follows, where there is no time",
    "timing.rows[].peer_us": "the peer's",
    "timing.rows[].speedup": "how many times as fast the layer is: the median of the pairs",
    "timing.rows[].speedup_low": "of its 95% interval",
    "timing.rows[].speedup_high": "of its 95% interval",
    "timing.rows[].floor": "the noise: what the stock layer against itself comes to, as a part of 1",
    "timing.rows[].detectable": "the smallest effect that would have been found, as a part of 1",
    "timing.rows[].by_process": "an array: the median speedup of each process",
    "timing.rows[].blocks": "that count, of all processes",
    "timing.rows[].dropped": "left out as outliers, blindly",
    "timing.rows[].clocks_us": "an object: clock -> the layer's time; the parent's has what surrounds a call in it",
    "timing.rows[].clocks_us.*": "a number, or null",
    "timing.rows[].layer_host_us": "what a call takes the host, on a GPU; else null",
    "timing.rows[].peer_host_us": "the peer's",
    "timing.rows[].roofline_us": "the least that the device could take, where its data sheet is known; else null",
    "timing.rows[].roofline_share": "of the roofline that the layer reaches, or null",
}


def paths(data: Any, at: str = "") -> Iterator[str]:
    """Every path in a document, as :data:`FIELDS` writes them."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            path = f"{at}.{key}" if at else key
            if path not in FIELDS and f"{at}.*" in FIELDS:
                path = f"{at}.*"
            yield path
            yield from paths(value, path)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from paths(value, f"{at}[]")


def unknown(data: Mapping[str, Any]) -> list[str]:
    """Paths of a document that :data:`FIELDS` does not have."""
    return sorted(set(paths(data)) - set(FIELDS))
