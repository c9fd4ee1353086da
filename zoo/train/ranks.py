"""The processes that train one model together: which of them this is, and what they say to each other.

torchrun starts them and torch.distributed joins them, by NCCL on GPUs and gloo on CPUs. Alone, a process is rank 0 of
1, and nothing here costs it anything.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.launch import launched
from zoo.machine import device_of
from zoo.preparing import choose_device

__all__ = ["RankGone", "Ranks", "joined"]

_T = TypeVar("_T")


class RankGone(ValueError):
    """Another rank has died or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``size`` processes, on a device of its own."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    def lead(self, work: Callable[[], _T]) -> _T:
        """What ``work()`` gives on rank 0, on every rank. A ValueError or OSError there is one everywhere."""
        if not self.several:
            return work()
        answer: list[Any] = [None, None]
        failed: Exception | None = None
        if self.leads:
            try:
                answer[0] = work()
            except (ValueError, OSError) as error:
                failed, answer[1] = error, (isinstance(error, OSError), str(error))
        dist.broadcast_object_list(answer)
        if failed is not None:
            raise failed
        if answer[1] is not None:
            of_the_system, text = answer[1]
            raise (OSError if of_the_system else ValueError)(text)
        return answer[0]

    def gathered(self, value: _T) -> list[_T]:
        """The value of each rank, on every rank."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, in place."""
        if self.several:
            dist.all_reduce(value)
            value /= self.size
        return value

    def all(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        if not self.several:
            return holds
        failed = torch.tensor(0.0 if holds else 1.0, device=self.device)
        dist.all_reduce(failed)
        return not bool(failed)

    def agree_on_buffers(self, model: torch.nn.Module) -> None:
        """Give each rank the buffers of rank 0: running statistics are of the images that a rank saw."""
        if self.several:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined until the end; or this process alone; or those that are joined already.

    Args:
        device: as TrainConfig's. On GPUs each rank takes the one of its number on its machine.

    Raises:
        ValueError: fewer GPUs than ranks on this machine, or a GPU by its number for several ranks. RankGone, a
            ValueError too: another rank died within.
    """
    owns = launched() and not dist.is_initialized()
    if not owns and not dist.is_initialized():
        yield Ranks(0, 1, device_of(choose_device(device)))
        return
    size = int(os.environ["WORLD_SIZE"]) if owns else dist.get_world_size()
    place = device_of(choose_device(device)) if size == 1 else _device_of_rank(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)  # or NCCL would make a context on the first GPU
    if owns and size > 1:
        on_gpu = place.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=place if on_gpu else None)
    rank = dist.get_rank() if dist.is_initialized() else 0
    try:
        with _loss_named(rank, size):
            yield Ranks(rank, size, place)
    except BaseException:
        if owns and dist.is_initialized() and place.type == "cpu":
            _leave()  # the others learn of it at once; NCCL would wait for them
        raise
    if owns and dist.is_initialized():
        _leave()


def _leave(at_most: float = 5.0) -> None:
    """Leave the group, and wait until gloo's threads rest, ``at_most`` seconds.

    A thread of gloo takes Python's lock to drop the tensors of the last collective that it did. Where Python ends
    meanwhile, that aborts the process, whose work is done, and fails the whole launch. Torch joins the threads with
    the group, but a DDP model that still lives holds the group, and DTensor's caches hold it for good.
    """
    dist.destroy_process_group()
    end, before = time.monotonic() + at_most, None
    while (now := _gloo_threads()) and not (now == before and all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > end:
            return
        before = now
        time.sleep(0.001)  # Python's lock is free: who waits for it runs now, and is seen to


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """State, and how often it began to run, of each thread that does collectives; empty where the system is silent."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            lines = (thread / "status").read_text().splitlines()
            said = dict(line.split(":", 1) for line in lines if ":" in line)
            if said["Name"].strip() == "pt_gloo_runloop":
                switches = [said.get(kind, "") for kind in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")]
                found[thread.name] = (said["State"].split()[0], *switches)
    return found


def _device_of_rank(device: str) -> torch.device:
    place, local = choose_device(device), int(os.environ.get("LOCAL_RANK", "0"))
    if place.type == "cpu":
        return place
    if place.index is not None:
        raise ValueError(f"device {device!r}: several ranks take a GPU each; expected cuda, cpu or auto")
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"device {device!r}: rank {local} of this machine finds {torch.cuda.device_count()} GPUs; expected one for "
            "each rank: start torchrun with fewer (--nproc-per-node), or train with --device cpu"
        )
    return torch.device("cuda", local)


@contextlib.contextmanager
def _loss_named(rank: int, size: int) -> Iterator[None]:
    """Say what a failing collective means. Its exceptions are RuntimeErrors of many texts."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if size > 1 and (isinstance(error, dist.DistError) or "gloo" in text or "Connection" in text):
            raise RankGone(
                f"rank {rank}: another rank has died or does not answer ({text.splitlines()[0][:200]}); the last "
                "checkpoint is as it was: start all ranks again with --resume"
            ) from error
        raise
