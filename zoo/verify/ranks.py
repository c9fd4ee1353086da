"""Processes that work together, the ranks of a job: they judge a claim that needs several.

Each claim has fresh ones. They are started by a process of their own, which has imported everything once: on the CPU
its forks, ready at once. On GPUs, which no fork may share, they are spawned.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED, Broken, Refused, Untested, outcome_of
from zoo.verify.subject import Subject
from zoo.verify.target import resolve

__all__ = ["SIZE", "TIME_LIMIT", "Check", "gathered", "judge_apart", "judge_in_ranks"]

SIZE = 2
TIME_LIMIT = 60.0
"""Seconds for one claim in all ranks."""
START_LIMIT = 90.0
"""Seconds that it may take before, for the first claim, to import everything."""
GRACE = 5.0
"""Seconds for the other ranks once one of them has failed: they may wait for it."""

Check = Callable[[Subject, int], None]
"""Judges a claim in one rank; raises what the check of a claim raises."""


@dataclass(frozen=True)
class _Job:
    check: Check
    target: bytes
    kind: str
    devices: tuple[str, ...]
    """Of each rank. A single one makes no group."""
    dtype: torch.dtype
    seed: int
    time_limit: float
    rank: int = -1
    folder: str = ""


@dataclass(frozen=True)
class _Answer:
    """What became of a rank, and when."""

    status: str
    reason: str = ""
    died: bool = False
    at: float = field(default_factory=time.monotonic)  # the same clock in all processes


def judge_in_ranks(check: Check, s: Subject) -> None:
    """Run ``check(subject, rank)`` in ``SIZE`` processes of one group, each on a GPU of its own if one is on any.

    Raises:
        Broken: in some rank the claim does not hold; or a rank died, or was not done in time.
        Refused, Untested: what a rank said; or there are too few GPUs, or the layer cannot be sent to a process.
    """
    if s.against is not None:
        raise Untested("it is compared with a twin, and what the ranks are compared with is the stock layer")
    if os.name != "posix" or not dist.is_available():
        raise Untested("torch.distributed, or the pipes that ranks are told by, are not there on this system")
    if s.device.type == "cuda" and torch.cuda.device_count() < SIZE:
        raise Untested(f"it needs {SIZE} GPUs; there is {torch.cuda.device_count()} (--device cpu judges it over gloo)")
    _judge(check, s, tuple(str(s.device) if s.device.type != "cuda" else f"cuda:{n}" for n in range(SIZE)))


def judge_apart(check: Check, s: Subject, device: torch.device) -> None:
    """Run ``check(subject, 0)`` in one fresh process, with the subject on another device. Raises as judge_in_ranks."""
    _judge(check, s, (str(device),))


def _judge(check: Check, s: Subject, devices: tuple[str, ...]) -> None:
    try:
        target = pickle.dumps(s.layer if s.target is None else s.target)
    except Exception as error:
        raise Untested(f"the layer cannot be sent to other processes: {error}") from None
    job = _Job(check, target, s.kind, devices, s.dtype, torch.initial_seed(), TIME_LIMIT)
    status, reason = _starter().judge(job)
    if status != PASS:
        raise {FAIL: Broken, REFUSED: Refused, UNTESTED: Untested}[status](reason)


def gathered(tensor: torch.Tensor) -> list[Any]:
    """A tensor as each rank has it."""
    found = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(found, tensor.contiguous())
    return found


# here


class _Starter:
    """The process that starts the ranks."""

    def __init__(self) -> None:
        self.connection, other = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from zoo.verify.ranks import serve; serve({other.fileno()})"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZOO_PARENT": str(os.getpid())}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        other.close()  # so that the end of the process is the end of the pipe
        if not self.connection.poll(START_LIMIT):
            self.stop()
            raise Untested(f"the process that starts the ranks was not ready after {START_LIMIT:g} s")
        try:
            self.connection.recv()
        except EOFError:
            self.stop()
            raise Untested("the process that starts the ranks ended before it was ready") from None

    def judge(self, job: _Job) -> tuple[str, str]:
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            self.connection.send(job)
            if self.connection.poll(job.time_limit + START_LIMIT):
                return self.connection.recv()
        self.stop()
        return FAIL, "the process that starts the ranks gave no answer"

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


_starters: list[_Starter] = []


def _starter() -> _Starter:
    while _starters and _starters[0].process.poll() is not None:
        _starters.pop().connection.close()
    if not _starters:
        _starters.append(_Starter())
        atexit.register(_starters[0].stop)
    return _starters[0]


# in the process that starts the ranks

_IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "zoo.verify.running",
)
"""What a fork need not import again."""


def serve(descriptor: int) -> None:
    """Jobs in, (status, reason) out, until the pipe or the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends this
    _die_with(int(os.environ["ZOO_PARENT"]))
    warnings.simplefilter("ignore")
    for name in _IMPORTED:
        importlib.import_module(name)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send("ready")
        while True:
            try:
                job = connection.recv()
            except (ImportError, AttributeError) as error:  # by name, from a module that is not on this one's path
                connection.send((UNTESTED, f"what it runs is in a module, and other processes do not find it: {error}"))
                continue
            connection.send(_judged(job))


def _judged(job: _Job) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="zoo-ranks-", dir=os.environ.get("ZOO_WORKER_FOLDER")) as folder:
        job = replace(job, folder=folder)
        return _verdict(_answers(job), job)


def _answers(job: _Job) -> dict[int, _Answer]:
    """What became of each rank, but of those that were not done in time."""
    on_cuda = job.devices[0].startswith("cuda")
    context = multiprocessing.get_context("spawn" if on_cuda else "fork")
    limit = job.time_limit + (START_LIMIT / 2 if on_cuda else 0.0)
    processes: dict[Any, tuple[int, BaseProcess]] = {}
    answers: dict[int, _Answer] = {}
    for rank in range(len(job.devices)):
        mine, other = context.Pipe()
        process = context.Process(target=_work, args=(other, replace(job, rank=rank)))  # type: ignore[attr-defined]
        process.start()
        other.close()
        processes[mine] = rank, process
    until = time.monotonic() + limit
    while len(answers) < len(processes):
        ready = wait(
            [c for c, (rank, _) in processes.items() if rank not in answers], max(0.0, until - time.monotonic())
        )
        if not ready:
            break
        connection: Any
        for connection in ready:
            rank, process = processes[connection]
            try:
                answers[rank] = connection.recv()
            except (EOFError, ConnectionResetError):
                answers[rank] = _Answer(FAIL, f"its process {_how_it_ended(process, job.folder, rank)}", died=True)
        if any(answer.status != PASS for answer in answers.values()):
            until = min(until, time.monotonic() + GRACE)
    for connection, (_, process) in processes.items():
        process.kill()
        process.join()
        connection.close()
    return answers


def _verdict(answers: dict[int, _Answer], job: _Job) -> tuple[str, str]:
    """The first trouble: what other ranks say after it, as that a connection was closed, comes of it."""
    ranks = [f"rank {n}: " if len(job.devices) > 1 else "" for n in range(len(job.devices))]
    troubles = [(not a.died, a.at, rank) for rank, a in answers.items() if a.status != PASS]
    if troubles:
        *_, rank = min(troubles)
        return answers[rank].status, f"{ranks[rank]}{answers[rank].reason}"
    late = [name for rank, name in enumerate(ranks) if rank not in answers]
    return (FAIL, f"{late[0]}not done after {job.time_limit:g} s") if late else (PASS, "")


def _how_it_ended(process: BaseProcess, folder: str, rank: int) -> str:
    process.join(GRACE)
    code = process.exitcode
    if code is None:
        return "closed its pipe"
    said = Path(folder, f"said-{rank}")
    text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    return f"was ended by {signal.Signals(-code).name}{last}" if code < 0 else f"ended with exit code {code}{last}"


# in a rank


def _work(connection: Connection, job: _Job) -> None:
    _die_with(os.getppid())
    said = os.open(Path(job.folder, f"said-{job.rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    torch.set_num_threads(1)
    answer = _done(job)
    connection.send(answer)
    os._exit(0)  # nothing of the layer's shall run at the end


def _done(job: _Job) -> _Answer:
    try:
        device = torch.device(job.devices[job.rank])
        layer = resolve(pickle.loads(job.target), job.kind)
        if grouped := len(job.devices) > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"file://{job.folder}/store",
                rank=job.rank,
                world_size=len(job.devices),
                timeout=datetime.timedelta(seconds=job.time_limit),
            )
        torch.manual_seed(job.seed)  # the same in all ranks, for equal weights
        job.check(Subject(layer, device, job.dtype, kind=job.kind), job.rank)
        if grouped:
            dist.barrier()  # so that no rank leaves while another still needs it
        return _Answer(PASS)
    except Exception as error:
        return _Answer(*outcome_of(error))


def _die_with(parent: int) -> None:
    """Where the parent is killed while this works, nothing else would end it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
