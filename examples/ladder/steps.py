"""The ladder as data: its steps, and what each was predicted to reach before any of them ran."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHIP", "SHAPES", "STEPS", "Chip", "Shape", "Step", "step_of"]


@dataclass(frozen=True)
class Chip:
    """The figures that the predictions are made from."""

    name: str
    sms: int
    clock: float
    """Hz, at which the tensor cores' peak is quoted."""
    tensor: int
    """bf16 multiply-adds of the tensor cores, a clock and SM."""
    fma: int
    """float32 multiply-adds, a clock and SM."""
    wavefront: int
    """Bytes that shared memory, or the L1, gives a clock and SM; a wavefront touches one line of 128."""
    l2: int
    """Bytes that the L2 gives, a clock and SM, when all of them ask."""

    def tflops(self, fma: float) -> float:
        """TFLOP/s of so many multiply-adds a clock and SM."""
        return 2 * fma * self.sms * self.clock / 1e12


CHIP = Chip(name="NVIDIA H200", sms=132, clock=1.83e9, tensor=2048, fma=128, wavefront=128, l2=40)


@dataclass(frozen=True)
class Shape:
    """y (M, N) = x (M, K) w (N, K)^T."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return f"{self.M}x{self.K}x{self.N}"

    @property
    def flops(self) -> int:
        return 2 * self.M * self.K * self.N


SHAPES = (Shape(4096, 4096, 4096), Shape(12608, 768, 3072))
"""That are timed: a square, and the first layer of a ViT-B's MLP at batch 64."""


@dataclass(frozen=True)
class Step:
    """One rung."""

    number: int
    file: str | None
    """Its source, beside this file; None for zoo's own kernel."""
    title: str
    limit: str
    """What is thought to bind it, and the arithmetic of the prediction."""
    predicted: tuple[float, float]
    """TFLOP/s at SHAPES, written down before the first run."""
    multiple: int
    """Of K, that it asks for. M and N may be anything."""


STEPS = (
    Step(
        1,
        "step_01_one_thread_one_output.cu",
        "one thread, one output",
        "the L1 looks at one line a clock: 33 lines for a warp's 32 multiply-adds",
        (0.47, 0.47),
        1,
    ),
    Step(
        2,
        "step_02_coalesced.cu",
        "coalesced: a warp, one output",
        "the L2: a block of 8 outputs reads 9 rows, 2.25 bytes a multiply-add, at 40 bytes a clock; at K = 768 a third "
        "of the instructions add across the warp",
        (8.6, 6.0),
        8,
    ),
    Step(
        3,
        "step_03_shared_tile.cu",
        "shared-memory tile",
        "shared memory: 40 wavefronts (32 of w, and 8 of x as 16-byte reads) for 32 warp-wide multiply-adds",
        (12.0, 12.0),
        1,
    ),
    Step(
        4,
        "step_04_register_tile.cu",
        "register tile, 8x8 a thread",
        "float32 units at 16 clocks a k of a warp, shared memory at 20 for bank conflicts; copying one number at a "
        "time costs 12% and its latency is half hidden by the second block",
        (35.0, 35.0),
        1,
    ),
    Step(
        5,
        "step_05_vectors_two_buffers.cu",
        "16-byte loads, two buffers",
        "float32 units: 64 of 73 instructions multiply, 88% of 62; less what cuBLAS loses too (its float32: 47)",
        (45.0, 45.0),
        8,
    ),
    Step(
        6,
        "step_06_tensor_cores.cu",
        "tensor cores: mma.sync, ldmatrix",
        "latency: 600 clocks for a tile from the L2, 150 to store it and meet, 400 to multiply, two blocks side by "
        "side",
        (440.0, 400.0),
        8,
    ),
    Step(
        7,
        "step_07_async_copies.cu",
        "cp.async, four stages",
        "the L2: tiles of 128x128 need 64 bytes a clock at full rate and get 40; mma.sync's own ceiling, 64% of "
        "wgmma's, is as near; less 3% for an uneven last wave",
        (600.0, 540.0),
        8,
    ),
    Step(
        8,
        "step_08_tma_wgmma.cu",
        "TMA, wgmma, one warpgroup",
        "the L2 as in step 7, if three blocks side by side hide each other's waits: nothing is loaded while a block "
        "multiplies",
        (600.0, 540.0),
        8,
    ),
    Step(
        9,
        "step_09_producer_consumers.cu",
        "producer, two consumers, 128x256",
        "the L2: 48 bytes a clock at full rate, so 83%; 3.9 waves of tiles count as 4; filling the ring and storing y "
        "are exposed, 4000 of 69500 clocks a tile (of 16300 at K = 768)",
        (750.0, 610.0),
        8,
    ),
    Step(
        10,
        None,
        "persistent, TMA stores: zoo's",
        "power and the last wave: it had run at 757 and 660 before this chapter (csrc/cuda/sm90/measured.txt)",
        (757.0, 660.0),
        8,
    ),
)


def step_of(number: int) -> Step:
    """The step of that number. ValueError if there is none."""
    for step in STEPS:
        if step.number == number:
            return step
    raise ValueError(f"step {number}: expected one of {', '.join(str(step.number) for step in STEPS)}")
