"""Every model of a glob, one by one: built, patched, run, compared with its source library's, and put back as it was.

:func:`sweep` is the whole of it and ``zoo sweep`` its command; :func:`fields_of` gives the figures of one model, from
the results that are stored in the package or computed on the meta device.
"""

from zoo.sweep.fields import ModelFields, fields_of, save_fields
from zoo.sweep.report import SweepReport
from zoo.sweep.rows import Failure, ParitySummary, SweepRow, Task
from zoo.sweep.running import sweep

__all__ = [
    "Failure",
    "ModelFields",
    "ParitySummary",
    "SweepReport",
    "SweepRow",
    "Task",
    "fields_of",
    "save_fields",
    "sweep",
]
