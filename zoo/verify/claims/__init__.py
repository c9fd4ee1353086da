"""The table of claims, in the order in which they are judged."""

from zoo.verify.claims import cuda, execution, gradients, module, processes, transforms, values
from zoo.verify.outcome import Claim

__all__ = ["CLAIMS"]

CLAIMS: tuple[Claim, ...] = (
    *values.CLAIMS,
    *gradients.CLAIMS,
    *execution.CLAIMS,
    *module.CLAIMS,
    *transforms.CLAIMS,
    *cuda.CLAIMS,
    *processes.CLAIMS,
)
