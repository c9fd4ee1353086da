"""Loads zoo's libraries, once, and says what was loaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "CUDA_KERNELS",
    "CUDA_LOADED",
    "CUDA_MISSING",
    "EAGER_MISSING",
    "OPERATORS",
    "build_info",
    "eager_linear",
    "eager_mlp",
    "implement",
    "library",
    "library_path",
    "operators",
]

OPERATORS = (
    "linear",
    "linear_activation",
    "linear_input_grad",
    "linear_weight_grad",
    "linear_bias_grad",
    "linear_backward",
    "linear_cast",
    "activation_grad",
    "mlp",
    "mlp_backward",
    "mlp_cast",
    "matmul",
)

CUDA_KERNELS = ("tiled", "gemv", "cublas", "mma", "small", "wgmma", "split3", "split6")
"""csrc/choice.h says what each is."""

_PACKAGE = Path(__file__).parent.parent


def library_path(stem: str) -> Path | None:
    """Where the library ``_C`` or ``_C_cuda`` lies, or None where it was not built."""
    return next((path for pattern in (f"{stem}.abi3.so", f"{stem}*.pyd") for path in _PACKAGE.glob(pattern)), None)


def build_info() -> dict[str, Any]:
    """How the libraries were built; empty where no build has left word."""
    file = _PACKAGE / "_build_info.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def _load() -> str | None:
    """Load the core and the CUDA library. Returns why CUDA tensors cannot be served, or None if they can."""
    if hasattr(torch.ops.zoo, "linear"):  # a second copy would register the same names again and abort
        raise ImportError("another copy of zoo's library is already loaded in this process; import only one zoo")
    core = library_path("_C")
    if core is None:
        raise ImportError(
            f"{_PACKAGE} holds zoo's sources without its compiled library. Build it in place with "
            "`python -m pip install -e .` in the folder above; or, if zoo is installed already, start Python where "
            "that folder does not come first (`pytest` and `zoo`, not `python -m pytest`)"
        )
    torch.ops.load_library(str(core))
    cuda = library_path("_C_cuda")
    if cuda is None:
        return (
            "zoo was built without CUDA. Rebuild it where nvcc is, with ZOO_CUDA=1 (`zoo doctor` says what is missing)"
        )
    if torch.version.cuda is None:
        return "this torch has no CUDA; zoo's CUDA library was left unloaded. Install a CUDA build of torch"
    try:
        torch.ops.load_library(str(cuda))
    except OSError as error:
        return f"zoo's CUDA library does not load with this torch (CUDA {torch.version.cuda}): {error}"
    return None


CUDA_MISSING = _load()
CUDA_LOADED = CUDA_MISSING is None

operators = torch.ops.zoo
"""Import the operators from here: then the library is loaded before anything names them."""


def _refuse(name: str) -> Any:
    def refuse(*args: Any) -> Any:
        raise RuntimeError(f"zoo::{name} was given CUDA tensors, but {CUDA_MISSING}")

    return refuse


if CUDA_MISSING:
    # in place of the dispatcher's dump of missing kernels
    for _name in OPERATORS:
        torch.library.impl(f"zoo::{_name}", "CUDA", _refuse(_name))


# Eager mode in C++


def _left_to_python(*args: Any) -> Any:
    return NotImplemented


def _load_eager() -> str | None:
    """Load ``zoo._C_eager``. Returns why it is not, or None if it is."""
    global eager_linear, eager_mlp, implement
    if os.environ.get("ZOO_EAGER") == "0":
        return "ZOO_EAGER=0 leaves it out"
    found, built = importlib.util.find_spec("zoo._C_eager"), build_info()
    # a library that the last build did not make may be of any torch
    if found is None or found.origin is None or Path(found.origin).name != built.get("eager"):
        return "the last build of zoo did not make it for this Python; rebuild zoo with this Python and torch"
    if built["torch"] != torch.__version__:
        return f"it was built with torch {built['torch']}, and this is {torch.__version__}; rebuild zoo with this torch"
    module = importlib.import_module("zoo._C_eager")
    try:
        eager_linear, eager_mlp, implement = module.linear, module.mlp, module.implement
    except AttributeError as error:
        return f"it was built from sources that are older than these ({error}); rebuild zoo"
    return None


eager_linear: Any = _left_to_python
"""``linear`` as eager mode calls it, with its autograd in C++; NotImplemented for what Python has to do
(csrc/eager.cpp)."""
eager_mlp: Any = _left_to_python
library = torch.library.Library("zoo", "IMPL")
"""What is registered from Python lives as long as this."""


def _implement(name: str, function: Any) -> None:
    library.impl(name, function, "Autograd")


implement: Any = _implement
"""``implement(name, function)`` registers the kernel of an operator's Autograd key. ``function`` takes the derivatives;
in C++ (csrc/eager_kernels.cpp) it is called only where one is asked for."""
EAGER_MISSING = _load_eager()
