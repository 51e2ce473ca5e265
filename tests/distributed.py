"""Four gloo processes on one machine that tests share: they start once and run many cases, in groups of 1 to 4 of them."""

from __future__ import annotations

import importlib
import queue
import socket
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 4
# A hang is a failure after so many seconds, of the process group and of the test.
TIME_LIMIT = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pool:
    """`run(function, size, *arguments)` calls function(group, *arguments) on the first `size` processes; a result for each."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.tasks = [context.Queue() for _ in range(SIZE)]
        self.answers = context.Queue()
        port = free_port()
        self.processes = [
            context.Process(target=_work, args=(rank, port, self.tasks[rank], self.answers), daemon=True)
            for rank in range(SIZE)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Any, size: int, *arguments: Any) -> list[Any]:
        for rank in range(size):
            self.tasks[rank].put((function.__module__, function.__name__, size, arguments))
        found: dict[int, Any] = {}
        while len(found) < size:
            try:
                rank, error, result = self.answers.get(timeout=2 * TIME_LIMIT)
            except queue.Empty:
                raise AssertionError(f"only the ranks {sorted(found)} of {size} answered") from None
            assert error is None, f"rank {rank}: {error}"
            found[rank] = result
        return [found[rank] for rank in range(size)]

    def close(self) -> None:
        """End the processes; they have answered, and leaving the group in order can take half a minute."""
        for process in self.processes:
            process.kill()
            process.join()


def _work(rank: int, port: int, tasks: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIME_LIMIT)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=SIZE, rank=rank, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in range(1, SIZE + 1)}
    while True:
        module, name, size, arguments = tasks.get()
        try:
            torch.manual_seed(0)
            answers.put((rank, None, getattr(importlib.import_module(module), name)(groups[size], *arguments)))
        except Exception:
            answers.put((rank, traceback.format_exc(), None))


def cut(length: int, size: int, kind: str) -> list[int]:
    """Boundaries of the parts of T: about equal ones, or unequal ones with an empty part first, in the middle or last."""
    if kind == "equal":
        return [length * rank // size for rank in range(size + 1)]
    inner = {"empty first": [0], "empty last": [length]}.get(kind, [length // 3] * 2)
    inner = sorted((inner + [length // 5, length // 2 + 1])[: size - 1])
    return [0, *(min(length, place) for place in inner), length]
