"""Functions run on several ranks: processes of this machine that talk by gloo, or by NCCL with a GPU each."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.dying import SERVER

SECONDS = 300
AFTER_A_FAILURE = 30
"""Seconds for the other ranks: by NCCL they wait for the one that failed."""


def run_on(ranks: int, function: Callable[..., Any], *args: Any, gpus: bool = False) -> list[Any]:
    """What ``function(*args)`` returned on each rank, in their order. AssertionError with its traceback where it
    raised. The function must be one of a module; with torch.distributed it finds its rank."""
    answers = outcomes(ranks, function, *args, gpus=gpus)
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
    assert not failed, "\n".join(failed)
    return [result for _, result in answers]


def outcomes(ranks: int, function: Callable[..., Any], *args: Any, gpus: bool = False) -> list[tuple[bool, Any]]:
    """Of each rank True and what it returned, or False and its traceback, or how it died."""
    server = multiprocessing.get_context("spawn") if gpus else SERVER  # CUDA does not live through a fork
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = server.Pipe(duplex=False)
            process = server.Process(target=_work, args=(theirs, rank, ranks, folder, function, args, gpus))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        answers: list[tuple[bool, Any]] = [(False, f"no answer within {SECONDS} s")] * ranks
        waiting, until = dict(zip(pipes, range(ranks), strict=True)), time.monotonic() + SECONDS
        while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = _answer(pipe, processes[rank])
                if not answers[rank][0] and gpus:
                    until = min(until, time.monotonic() + AFTER_A_FAILURE)
        for process in processes:
            process.join(5)
            process.kill()
    return answers


def _answer(pipe: Any, process: Any) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
        return answer
    except EOFError:
        process.join()
        return False, f"it died with exit code {process.exitcode}"


def _work(pipe: Any, rank: int, ranks: int, folder: str, function: Callable[..., Any], args: Any, gpus: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    place: dict[str, Any] = {"backend": "gloo"}
    if gpus:
        torch.cuda.set_device(rank)
        place = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(store=store, rank=rank, world_size=ranks, **place)
    try:
        pipe.send((True, function(*args)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
