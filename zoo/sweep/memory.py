"""How much memory models take, so that no more are looked at together than there is room for."""

from __future__ import annotations

import dataclasses
import os

import torch

from zoo.sweep.fields import stored
from zoo.sweep.rows import Task

__all__ = ["fitted", "need", "room"]

PER_PARAMETER = 33
"""Bytes: the model, its reference and their copy in float64, each with gradients (8 + 8 + 16), and buffers."""
PER_FLOP = 0.03
"""Bytes of activations in float64, of two images, for each FLOP of one image's forward; chosen from counts on
the meta device. A model of which this says too little is looked at again, alone."""
LEAST = 1_500_000_000
"""Of CUDA's context, libraries and workspaces; an estimate."""
LEAN = 0.2
"""Of the activations, what is left where they are computed again in backward; an estimate."""
LARGE = 0.25
"""Of the room: a model that takes more is run so."""
SHARE = 0.85
"""Of the device's memory. The rest is for what the allocator keeps in pieces."""


def need(task: Task) -> int:
    """Bytes of memory that a model takes, roughly, by the figures that are stored of it."""
    fields = stored().get(task.name)
    parameters, flops = (0, 0) if fields is None else (fields.parameters or 0, fields.flops or 0)
    if task.on == "meta" or (task.max_parameters is not None and parameters > task.max_parameters):
        return 0
    return round(PER_PARAMETER * parameters + PER_FLOP * flops * (LEAN if task.lean else 1.0) + LEAST)


def fitted(task: Task, room: int) -> Task:
    """The task, made lean where the model would leave too little of the room to others."""
    return dataclasses.replace(task, lean=True) if need(task) > LARGE * room else task


def room(device: str) -> int:
    """Bytes of memory that a sweep may take on a device."""
    chosen = torch.device(device)
    if chosen.type == "cuda":
        return round(SHARE * torch.cuda.get_device_properties(chosen).total_memory)
    return round(SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
