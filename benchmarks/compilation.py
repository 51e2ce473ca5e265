"""Seconds that every kernel takes to compile: what a first call waits for, once per machine.

Data path: in a process of its own, with an empty folder for machine code, the calls of `CASES` are made one after another on a
few numbers; the compiler's log says what was compiled for each and how long that took. The first is a kernel that does nothing:
what it takes is Numba's own start.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.expm import value_and_gradients
from benchmarks.halves import rounded
from benchmarks.problem import Shape, make_inputs
from shippo_ssm import transport_scan
from shippo_ssm.actions import Dissipative, Orthogonal, RightAction, SplitFlow, expm
from shippo_ssm.engine import launch
from shippo_ssm.engine.compiler import COMPILED
from shippo_ssm.models import SequenceConfig, SequenceModel

START = "a kernel that does nothing"
WIDTHS = (1, 2, 4, 8, 16)
_MATRICES = 64


class Numbers(NamedTuple):
    """Operands of the kernel that does nothing."""

    x: Tensor


class Listener(logging.Handler):
    """Keeps what the compiler says: (kernel, seconds)."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.heard: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == COMPILED and isinstance(record.args, tuple):
            name, seconds = record.args
            self.heard.append((str(name).partition("(")[0], float(str(seconds))))


def measure(widths: tuple[int, ...] = WIDTHS) -> dict[str, Any]:
    """Every kernel of `cases`, with what it was compiled for and the seconds that took."""
    listener, logger = Listener(), logging.getLogger("shippo_ssm")
    before, level = os.environ.get("SHIPPO_CACHE_DIR"), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    kernels = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SHIPPO_CACHE_DIR"] = folder
            for name, call in cases(widths):
                listener.heard.clear()
                call()
                kernels += [{"of": name, "kernel": kernel, "seconds": seconds} for kernel, seconds in listener.heard]
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        os.environ.pop("SHIPPO_CACHE_DIR")
        if before is not None:
            os.environ["SHIPPO_CACHE_DIR"] = before
    return {"kernels": kernels}


def cases(widths: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is called, by name."""
    yield START, partial(launch, _nothing, 1, Numbers(torch.zeros(1)))
    for width in widths:
        for dtype in (torch.float32, torch.bfloat16):
            name = "scan" if dtype == torch.float32 else "scan of bfloat16"
            yield f"{name}, P = {width}", partial(_scan, width, dtype)
    for width in [width for width in widths if width > 1]:
        # A norm of several hundred: the part in float64 is needed too.
        matrices = torch.linspace(0.0, 100.0, _MATRICES)[:, None, None] * torch.ones(width, width).tril(-1)
        yield f"expm, P = {width}", partial(_differentiate, expm, matrices)
        for family in (Orthogonal(width), Dissipative(width), SplitFlow(width)):
            scale = 1.0 if isinstance(family, SplitFlow) else 100.0
            coords = torch.linspace(0.0, scale, _MATRICES)[:, None].expand(-1, family.num_coordinates).contiguous()
            yield f"{type(family).__name__}, P = {width}", partial(_differentiate, family, coords, torch.ones(_MATRICES))
    for right in ("split", "orthogonal", "dissipative"):
        for width in [width for width in widths if width in (4, 8)]:
            yield f"model, {right}, P = {width}", partial(_model, right, width)


def _nothing() -> Callable[..., None]:
    def nothing(operands, start, stop):
        pass

    return nothing


def _inputs(width: int) -> tuple[dict[str, Tensor], Tensor]:
    return make_inputs(Shape(batch=2, length=48, groups=2, width=width))


def _scan(width: int, dtype: torch.dtype) -> None:
    inputs, dy = _inputs(width)
    leaves: dict[str, Any] = {name: tensor.requires_grad_() for name, tensor in rounded(inputs, dtype).items()}
    y, _ = transport_scan(**leaves)
    y.backward(dy.to(dtype))


def _differentiate(function: Callable[..., Tensor] | RightAction, *inputs: Tensor) -> None:
    width = inputs[0].shape[-1] if function is expm else function.width  # pyright: ignore[reportFunctionMemberAccess]
    value_and_gradients(function, inputs, torch.ones(_MATRICES, width, width))


def _model(right: str, width: int) -> None:
    """A training step, and decoding."""
    model = SequenceModel(SequenceConfig(d_model=32, n_layers=1, group_width=width, right=right))
    u = torch.randn(2, 48, 32)
    model(u).sum().backward()
    with torch.no_grad():
        model.step(u[:, 0], in_place=True)
