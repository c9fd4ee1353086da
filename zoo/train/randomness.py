"""The random numbers of a run: where they stand, put back, and seeded for one image alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

__all__ = ["rng_state", "seed_all", "seed_rank", "seeded", "set_rng_state"]


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(*numbers: int) -> None:
    """Seed torch alone, by a rank and what else tells it from others. What Python and numpy draw is for a whole batch,
    and must be the same on every rank."""
    torch.manual_seed(_seed(numbers))


def _seed(numbers: tuple[int, ...]) -> int:
    return int(numpy.random.SeedSequence(numbers).generate_state(1)[0])


def rng_state(device: torch.device) -> dict[str, Any]:
    """Where all generators stand, in what torch.load reads with weights_only."""
    _, keys, position, has_gauss, gauss = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where :func:`rng_state` found them."""
    random.setstate(state["python"])
    keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Within it, the generators of the CPU depend on these numbers alone; after it they stand where they stood."""
    python, arrays, tensors = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    seed = _seed(numbers)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that reaches for the GPUs, too
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(tensors)
