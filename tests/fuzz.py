"""Random cases of the scan and the cell against a NumPy loop that shares no code with the library.

    python -m tests.fuzz                          # 10,000 cases, outcome in results/fuzz.json
    python -m tests.fuzz --first 1234 --cases 1   # one case again; nothing is written

Data path: `draw` makes a case from (seed, number): sizes, kinds of operands, a regime of extreme values, a backend and a number
of threads. `oracle` computes outputs, final states and all gradients in float64, position by position; `run` does so with the
library. `compare` gives the largest error of each tensor, over the RMS of its transport group, and what is wrong about NaN.
Where an error is too large, `loop_errors` says whether a float32 loop is as bad.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from shippo_ssm import dispatch
from shippo_ssm.layers import CellState, shippo_cell
from shippo_ssm.scan import transport_scan

RESULT = Path(__file__).parents[1] / "results" / "fuzz.json"
BACKENDS = ("auto", "fused", "segmented", "chunked", "associative", "reference")
THREADS = (1, 2, 4)
REGIMES = (
    "contracting", "near-unit", "long expanding right", "long contracting right", "zero steps", "full forgetting",
    "singular right", "tiny", "huge", "mixed magnitudes", "NaN",
)  # fmt: skip
# Largest error of a tensor over the RMS of its transport group.
TOLERANCE = {"float32": 2e-4, "float64": 1e-11, "bfloat16": 0.15}
# Roundings of the largest gradient that any gradient may be off by, see `rounding`. States are float32 for bfloat16.
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-23}
ROUNDINGS = 16
# An error may be so many times that of the NumPy loop in float32.
CONDITIONING = 10
# What machine code is made for. The suite takes the first few, since each has to be compiled.
SIGNATURES = (
    {"dtype": "float32", "N": 5, "P": 3, "rank": 1, "right": True, "varying": False},
    {"dtype": "float64", "N": 5, "P": 3, "rank": 1, "right": True, "varying": True},
    {"dtype": "bfloat16", "N": 16, "P": 4, "rank": 1, "right": True, "varying": False},
    {"dtype": "float32", "N": 32, "P": 4, "rank": 1, "right": True, "varying": False},
    {"dtype": "float32", "N": 16, "P": 8, "rank": 1, "right": True, "varying": True},
    {"dtype": "float32", "N": 3, "P": 2, "rank": 1, "right": False, "varying": True},
    {"dtype": "float32", "N": 1, "P": 1, "rank": 1, "right": True, "varying": False},
    {"dtype": "float32", "N": 9, "P": 6, "rank": 2, "right": True, "varying": False},
    {"dtype": "float64", "N": 7, "P": 16, "rank": 1, "right": True, "varying": False},
    {"dtype": "float64", "N": 17, "P": 5, "rank": 3, "right": False, "varying": False},
    {"dtype": "bfloat16", "N": 6, "P": 3, "rank": 2, "right": True, "varying": True},
    {"dtype": "bfloat16", "N": 33, "P": 8, "rank": 1, "right": False, "varying": False},
    # Wider than the kernels: torch alone.
    {"dtype": "float64", "N": 4, "P": 17, "rank": 1, "right": True, "varying": True},
)


@dataclass
class Case:
    """One call. Arrays are float64 with numbers that `dtype` can hold; `sequences` are (row, positions) in time order."""

    call: str
    regime: str
    backend: str
    threads: int
    dtype: str
    layout: str
    operands: dict[str, Any]
    """value [B, T, G, r, P], write [B, T, Q, r, N], read [B, T, Q, N], step and mix [B, T, G], drift, right."""
    state: dict[str, np.ndarray]
    """memory [S, G, N, P]; for the cell also write [S, Q, r, N] and value [S, G, r, P]."""
    sequences: list[tuple[int, np.ndarray]]
    cu_seqlens: np.ndarray | None
    mask: np.ndarray | None
    cotangents: dict[str, np.ndarray]
    has_state: bool
    rank_axis: bool
    """Whether the library gets an axis for the rank; without one only where r = 1."""

    def __str__(self) -> str:
        shapes = {name: array.shape for name, array in self.operands.items() if array is not None}
        return (
            f"{self.call}, {self.regime}, backend={self.backend!r}, threads={self.threads}, {self.dtype}, {self.layout}, "
            f"{shapes}, cu_seqlens={None if self.cu_seqlens is None else self.cu_seqlens.tolist()}, "
            f"masked={self.mask is not None}, state={self.has_state}"
        )


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers that `dtype` can hold, in float64."""
    return torch.from_numpy(np.array(array, dtype=np.float64)).to(getattr(torch, dtype)).double().numpy()


def orthogonal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return np.linalg.qr(random.standard_normal(shape))[0]


def draw(seed: int, number: int, signatures: int = len(SIGNATURES), backends: tuple[str, ...] = BACKENDS) -> Case:
    """Case `number`: the same for the same arguments."""
    random = np.random.default_rng([seed, number])

    def choose(*options: Any) -> Any:
        return options[random.integers(len(options))]

    signature = SIGNATURES[random.integers(signatures)]
    dtype, N, P, rank = (signature[name] for name in ("dtype", "N", "P", "rank"))
    call, backend, threads = choose("scan", "cell"), choose(*backends), choose(*THREADS)
    if backend == "fused" and P > dispatch.MAX_SCAN_WIDTH:
        backend = "auto"
    regime = REGIMES[random.integers(len(REGIMES))]
    long = regime.startswith("long")
    G = choose(1, 2, 3, 4, 6) if not long else choose(1, 2)
    Q = choose(*[sets for sets in range(1, G + 1) if G % sets == 0])
    B, T = choose(1, 1, 2, 3), choose(1, 2, 3, 8, 17, 40, 64, 65, 100)
    if long:
        B, T = 1, 130 if backend in ("reference", "associative") else choose(130, 300)
    if random.random() < 0.02:
        B, T = choose((0, T), (B, 0))
    packed, masked = random.random() < 0.3, False
    cu_seqlens = mask = None
    if packed:
        B = 1
        inner = np.sort(random.integers(0, T + 1, choose(0, 1, 2, 5)))
        cu_seqlens = np.concatenate([[0], inner, [T]])
        sequences = [(0, np.arange(low, high)) for low, high in pairwise(cu_seqlens)]
    else:
        masked = call == "cell" and random.random() < 0.4
        mask = random.random((B, T)) < 0.7 if masked else None
        sequences = [(row, np.flatnonzero(mask[row]) if mask is not None else np.arange(T)) for row in range(B)]
    S = len(sequences)

    normal, uniform = random.standard_normal, random.random
    value, write, read = normal((B, T, G, rank, P)), normal((B, T, Q, rank, N)), normal((B, T, Q, N))
    step, mix = 0.3 + 0.7 * uniform((B, T, G)), uniform((B, T, G))
    drift = -0.05 - uniform((B, T, G, N) if signature["varying"] else (G, N))
    right = orthogonal(random, B, T, G, P, P) if signature["right"] else None
    memory = normal((S, G, N, P))
    if regime == "near-unit":
        drift *= 1e-3
    elif long:
        # Each product leaves float32, and the longer ones float64; the state loses 2 % a step.
        growth = choose(1.2, 2.0, 30.0, 1e3) if regime == "long expanding right" else choose(0.9, 0.5, 1e-2)
        growth = growth if right is not None else 1.0
        step = np.ones_like(step)
        drift = np.full_like(drift, -np.log(growth) - 0.02)
        right = None if right is None else growth * right
    elif regime == "zero steps":
        step = step * (uniform(step.shape) < 0.5)
    elif regime == "full forgetting":
        if drift.ndim == 4 and choose(True, False):
            drift = np.where(uniform(drift.shape) < 0.2, -1e5, drift)
        else:
            step = np.where(uniform(step.shape) < 0.2, 1e6, step)
            # The cell's source is in proportion to the step.
            value = value * 1e-3
    elif regime == "singular right" and right is not None:
        right = right * (uniform((B, T, G, 1, P)) < 0.7)
    elif regime in ("tiny", "huge"):
        scale = 2.0 ** (-45 if regime == "tiny" else 45)
        value, memory = value * scale, memory * scale
    elif regime == "mixed magnitudes":
        exponent = random.integers(-30, 31)
        value, write, memory, read = (
            value * 2.0**exponent,
            write * 2.0**-exponent,
            memory * 2.0 ** choose(-10, 0),
            read * 2.0**20,
        )

    operands = {"value": value, "write": write, "read": read, "step": step, "mix": mix, "drift": drift, "right": right}
    if call == "scan":
        del operands["mix"]
    operands = {name: None if array is None else rounded(array, dtype) for name, array in operands.items()}
    kept = "float32" if dtype == "bfloat16" else dtype
    state = {"memory": memory}
    if call == "cell":
        scale = np.abs(value).mean() if value.size else 1.0
        state |= {"write": normal((S, Q, rank, N)), "value": normal((S, G, rank, P)) * scale}
    has_state = random.random() < 0.6
    state = {name: rounded(array if has_state else np.zeros_like(array), kept) for name, array in state.items()}
    if regime == "NaN" and B * T:
        # A constant drift of NaN is one at padding too.
        names = [
            name for name in operands if operands[name] is not None and not (masked and name == "drift" and drift.ndim == 2)
        ]
        name = choose(*names)
        array: Any = operands[name]
        array[np.unravel_index(random.integers(array.size), array.shape)] = np.nan
    cotangents = {"y": rounded(normal((B, T, G, P)), dtype)}
    cotangents |= {name: rounded(normal(array.shape), kept) for name, array in state.items()}
    layout = choose("plain", "plain", "transposed", "negative", "half")
    rank_axis = rank > 1 or bool(choose(True, False))
    return Case(
        call, regime, backend, threads, dtype, layout, operands, state, sequences, cu_seqlens, mask, cotangents, has_state,
        rank_axis,
    )  # fmt: skip


def oracle(case: Case, skips_first: bool = False) -> dict[str, np.ndarray]:
    """H_t = L_t (H_{t-1} + b_t U_{t-1}) R_t + g_t U_t and y_t = c_t^T H_t, one position after the other, and its adjoint.

    The scan has b = 0 and g = 1; the cell b = (1 - mix) step and g = mix step. `skips_first` leaves the first term of a first
    position out, which makes a difference only for NaN: 0 NaN is NaN.
    """
    given = case.operands
    value, step, drift, right = given["value"], given["step"], given["drift"], given["right"]
    B, T, G, rank, P = value.shape
    write, read = (given[name].repeat(G // given[name].shape[2], axis=2) for name in ("write", "read"))
    Q, N = case.operands["read"].shape[2:]
    mix, dtype = given.get("mix"), value.dtype
    result = {"y": np.zeros((B, T, G, P))}
    result |= {f"final {name}": array.copy() for name, array in case.state.items()}
    d = {name: np.zeros_like(array) for name, array in given.items() if array is not None}
    dwrite, dread = np.zeros(write.shape), np.zeros(read.shape)
    dstate = {name: np.zeros_like(array) for name, array in case.state.items()}
    cell = case.call == "cell"

    for number, (row, positions) in enumerate(case.sequences):
        H = case.state["memory"][number]
        last = None
        if cell:
            last_write = case.state["write"][number].repeat(G // Q, axis=0)
            last = np.einsum("grn,grp->gnp", last_write, case.state["value"][number])
        trace = []
        for t in positions:
            a = drift if drift.ndim == 2 else drift[row, t]
            L = np.exp(step[row, t][:, None] * a)
            R = None if right is None else right[row, t]
            U = np.einsum("grn,grp->gnp", write[row, t], value[row, t])
            g = mix[row, t] * step[row, t] if mix is not None else np.ones(G, dtype)
            b = (1 - mix[row, t]) * step[row, t] if mix is not None else np.zeros(G, dtype)
            K = H + b[:, None, None] * last if last is not None else H
            # Without `right` no product: it would spread a NaN over the columns.
            M = K if R is None else K @ R
            alone = skips_first and not trace
            H = g[:, None, None] * U if alone else L[:, :, None] * M + g[:, None, None] * U
            result["y"][row, t] = np.einsum("gn,gnp->gp", read[row, t], H)
            trace.append((t, a, L, R, U, g, b, K, M, H, last, alone))
            last = U if cell else None
        result["final memory"][number] = H
        S, dU = case.cotangents["memory"][number], np.zeros((G, N, P), dtype)
        if cell and len(positions):
            t = positions[-1]
            result["final write"][number] = given["write"][row, t]
            result["final value"][number] = value[row, t]
            d["write"][row, t] += case.cotangents["write"][number]
            d["value"][row, t] += case.cotangents["value"][number]
        elif cell:
            dstate["write"][number] += case.cotangents["write"][number]
            dstate["value"][number] += case.cotangents["value"][number]
        for t, a, L, R, U, g, b, K, M, H, before, alone in reversed(trace):
            dy = case.cotangents["y"][row, t]
            dread[row, t] += np.einsum("gp,gnp->gn", dy, H)
            dH = S + read[row, t][:, :, None] * dy[:, None, :]
            dU = dU + g[:, None, None] * dH
            dwrite[row, t] += np.einsum("gnp,grp->grn", dU, value[row, t])
            d["value"][row, t] += np.einsum("gnp,grn->grp", dU, write[row, t])
            S, dU = np.zeros((G, N, P), dtype), np.zeros((G, N, P), dtype)
            if not alone:
                dlog = (dH * M).sum(2) * L
                d["step"][row, t] += (dlog * a).sum(1)
                place = d["drift"] if drift.ndim == 2 else d["drift"][row, t]
                place += dlog * step[row, t][:, None]
                dM = L[:, :, None] * dH
                if R is not None:
                    d["right"][row, t] += K.transpose(0, 2, 1) @ dM
                S = dM if R is None else dM @ R.transpose(0, 2, 1)
            if mix is not None:
                dg, db = (dH * U).sum((1, 2)), (S * before).sum((1, 2))
                d["step"][row, t] += mix[row, t] * dg + (1 - mix[row, t]) * db
                d["mix"][row, t] += step[row, t] * (dg - db)
                dU = b[:, None, None] * S
        dstate["memory"][number] += S
        if cell:
            dstate["write"][number] += (
                np.einsum("gnp,grp->grn", dU, case.state["value"][number]).reshape(Q, G // Q, rank, N).sum(1)
            )
            dstate["value"][number] += np.einsum("gnp,grn->grp", dU, case.state["write"][number].repeat(G // Q, axis=0))
    d["write"] += dwrite.reshape(B, T, Q, G // Q, rank, N).sum(3)
    d["read"] += dread.reshape(B, T, Q, G // Q, N).sum(3)
    result |= {f"gradient of {name}": array for name, array in d.items()}
    if case.has_state:
        result |= {f"gradient of initial {name}": array for name, array in dstate.items()}
    return result


def arranged(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another place: other strides, a negative view, or every second number of a larger tensor."""
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "negative":
        return torch._neg_view(-tensor)
    if layout == "half":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]
    return tensor


def run(case: Case) -> dict[str, np.ndarray]:
    """Outputs, final states and gradients by the library, in float64 and with the shapes of `oracle`."""
    dtype = getattr(torch, case.dtype)
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    shapes = {name: array.shape for name, array in case.operands.items() if array is not None}

    def leaf(array: np.ndarray, dtype: torch.dtype, squeeze: bool) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(array)).to(dtype)
        return (tensor.squeeze(-2) if squeeze else tensor).requires_grad_()

    leaves = {
        name: leaf(array, dtype, name in ("value", "write") and not case.rank_axis)
        for name, array in case.operands.items()
        if array is not None
    }
    starts = {name: leaf(array, kept, name != "memory" and not case.rank_axis) for name, array in case.state.items()}
    arguments: dict[str, Any] = {name: arranged(tensor, case.layout) for name, tensor in leaves.items()}
    entering = {name: arranged(tensor, case.layout) for name, tensor in starts.items()}
    options: dict[str, Any] = {
        "cu_seqlens": None if case.cu_seqlens is None else torch.from_numpy(case.cu_seqlens.copy()),
        "output_final_state": True,
        "backend": case.backend,
    }
    if case.call == "scan":
        options["initial_state"] = entering["memory"] if case.has_state else None
        y, memory = transport_scan(**arguments, **options)
        final = {"memory": memory}
    else:
        options |= {"mask": None if case.mask is None else torch.from_numpy(case.mask)}
        options["initial_state"] = CellState(**entering) if case.has_state else None
        y, state = shippo_cell(**arguments, **options)
        assert state is not None
        final = state._asdict()
    outputs: dict[str, torch.Tensor] = {"y": y} | {name: tensor for name, tensor in final.items() if tensor is not None}
    # What stood before an empty sequence and was not given has no gradient.
    ends = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
    on = [torch.from_numpy(case.cotangents[name]).to(tensor.dtype).view_as(tensor) for name, tensor in ends.items()]
    wanted = {f"gradient of {name}": tensor for name, tensor in leaves.items()}
    wanted |= {f"gradient of initial {name}": tensor for name, tensor in starts.items() if case.has_state}
    gradients = torch.autograd.grad([*ends.values()], [*wanted.values()], on, allow_unused=True, materialize_grads=True)
    result = {"y": y} | {f"final {name}": tensor for name, tensor in outputs.items() if name != "y"}
    result |= dict(zip(wanted, gradients))
    for name, array in case.state.items():
        shapes |= {f"final {name}": array.shape, f"initial {name}": array.shape}
    result = {name: tensor.detach().double().resolve_neg().numpy() for name, tensor in result.items()}
    return {name: array.reshape(shapes.get(name.removeprefix("gradient of "), array.shape)) for name, array in result.items()}


def spoiled_places(case: Case, expected: dict[str, np.ndarray]) -> np.ndarray:
    """[S, G]: sequences and transport groups whose numbers are NaN somewhere in the oracle."""
    groups = expected["y"].shape[2]
    places = np.zeros((len(case.sequences), groups), bool)
    for name, true in expected.items():
        if name == "gradient of drift" and true.ndim == 2:
            continue
        for number, (row, positions) in enumerate(case.sequences):
            of_state = "final" in name or "initial" in name
            part = true[number : number + 1] if of_state else true[row, positions]
            there: Any = np.isnan(part).any(axis=(0, *range(2, part.ndim)))
            places[number] |= there.repeat(groups // len(there))
    return places


def may_be_nan(case: Case, name: str, true: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Where a result may be NaN, in the shape of `true`: y from the first NaN on, all others in the same sequence and group."""
    may = np.zeros(true.shape, bool)
    kernels = case.backend in ("auto", "fused", "segmented") and true.shape[-1] <= dispatch.MAX_SCAN_WIDTH
    if name == "gradient of drift" and true.ndim == 2:
        may |= places.any(0, keepdims=True).T
    elif "final" in name or "initial" in name:
        sets = places.reshape(len(places), true.shape[1], -1).any(2)
        may |= sets.reshape(sets.shape + (1,) * (true.ndim - 2))
    else:
        for number, (row, positions) in enumerate(case.sequences):
            sets = places[number].reshape(true.shape[2], -1).any(1)
            if name == "y":
                real = np.isin(np.arange(len(true[row])), positions)
                nan = np.isnan(true[row]).any(-1) & real[:, None]
                # Padding in between reads 0 times the memory.
                begun = np.maximum.accumulate(nan) if case.mask is not None else np.maximum.accumulate(nan[positions])
                if case.call == "cell" and not kernels:
                    # In torch the memory after t holds the next step's share of the source of t, which y_t does not see.
                    begun[:-1] |= begun[1:]
                may[row, slice(None) if case.mask is not None else positions] |= begun[..., None]
            else:
                may[row, positions] |= sets.reshape(sets.shape + (1,) * (true.ndim - 3))
    return may


def rounding(case: Case, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """What rounding alone may make of an entry of each gradient.

    |x| |dx| of an operand x is what the loss gains by a relative change of x. It has the loss's unit for every operand, so the
    largest of them, over all operands and positions, divided by |x| is the size of dx in a case without cancellation. A true
    gradient may be far smaller, or zero: that of `right` is where nothing was kept before, and a moving frame finds it as the
    difference of larger numbers. A few roundings of that size are no fault; a share of TOLERANCE would hide small gradients.
    """
    operands = {name: array for name, array in case.operands.items() if array is not None}
    operands |= {f"initial {name}": array for name, array in case.state.items()}

    def norms(name: str, array: np.ndarray) -> np.ndarray:
        """One per position; one per sequence for a state, one for a constant drift."""
        kept = 1 if name.startswith("initial") else 0 if array.ndim == 2 else 2
        return np.sqrt(np.nansum(np.square(array), tuple(range(kept, array.ndim))))

    names = [name for name, array in operands.items() if array.size and f"gradient of {name}" in expected]
    sizes = {name: norms(name, operands[name]) for name in names}
    largest = max((float((sizes[name] * norms(name, expected[f"gradient of {name}"])).max()) for name in names), default=0.0)
    typical = {name: float(np.sqrt(np.mean(np.square(size)))) for name, size in sizes.items()}
    unit = ROUNDINGS * EPSILON[case.dtype] * largest
    return {f"gradient of {name}": unit / size for name, size in typical.items() if size > 0}


def compare(
    case: Case,
    got: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    skipped: dict[str, np.ndarray] | None = None,
    limits: dict[str, float] | None = None,
) -> tuple[dict[str, float], list[str]]:
    """Errors by name, and complaints. Numbers are compared per row and transport group (or set of vectors).

    After a NaN a backend that composes maps may have more of them than the loop, but only in the same sequence and group.
    Without an initial state it may ignore what would act on it: only the NaN of `skipped` have to be there.
    """
    errors, complaints = {}, []
    tolerance = TOLERANCE[case.dtype]
    noise = rounding(case, expected)
    if got.keys() != expected.keys():
        return {}, [f"{sorted(got)} instead of {sorted(expected)}"]
    places = spoiled_places(case, expected)
    for name, true in expected.items():
        ours = got[name]
        if ours.shape != true.shape:
            complaints.append(f"{name}: shape {ours.shape} instead of {true.shape}")
            continue
        if not true.size:
            continue
        lost = np.isnan((skipped or expected)[name]) & np.isfinite(ours)
        if lost.any():
            complaints.append(f"{name}: {int(lost.sum())} NaN are lost")
        kept = ~may_be_nan(case, name, true, places)
        if not np.isfinite(ours[kept]).all():
            complaints.append(f"{name}: {int((~np.isfinite(ours[kept])).sum())} numbers are not finite")
            continue
        # The axis of groups or sets: the first of a constant drift, the second of a state, else the third.
        axis = 0 if name == "gradient of drift" and true.ndim == 2 else 1 if "final" in name or "initial" in name else 2
        others = tuple(range(axis + 1, true.ndim)) if axis < 2 else (1, *range(3, true.ndim))
        # Zeros of the oracle that underflow in float32 are zeros there.
        size = np.sqrt(np.mean(np.square(np.where(kept, true, 0)), others, keepdims=True)) + 1e-30
        # An error of TOLERANCE of the RMS and the rounding together is one of TOLERANCE.
        size += noise.get(name, 0.0) / tolerance
        errors[name] = error = float((np.abs(np.where(kept, ours - true, 0)) / size).max())
        limit = max(tolerance, (limits or {}).get(name, 0.0))
        if error > limit:
            complaints.append(f"{name}: error {error:.1e} > {limit:.0e}")
    return errors, complaints


def loop_errors(case: Case, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Errors of the NumPy loop in float32: what no backend that computes in float32 can be blamed for."""

    def single(arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: None if array is None else array.astype(np.float32) for name, array in arrays.items()}

    alike = replace(case, operands=single(case.operands), state=single(case.state), cotangents=single(case.cotangents))
    with np.errstate(all="ignore"):
        return compare(case, oracle(alike), expected)[0]


def check(case: Case) -> tuple[dict[str, float], list[str]]:
    """Run one case with its number of threads and short segments."""
    threads = torch.get_num_threads()
    with np.errstate(all="ignore"):
        expected = oracle(case)
        skipped = oracle(case, skips_first=True) if case.regime == "NaN" and not case.has_state else None
    try:
        torch.set_num_threads(case.threads)
        # Sequences of tens of positions are cut as those of thousands are.
        with mock.patch.object(dispatch, "SEGMENT_LENGTH", 16):
            got = run(case)
    except Exception:
        return {}, [traceback.format_exc(limit=-3)]
    finally:
        torch.set_num_threads(threads)
    errors, complaints = compare(case, got, expected, skipped)
    if complaints and case.dtype != "float64":
        limits = {name: CONDITIONING * error for name, error in loop_errors(case, expected).items()}
        errors, complaints = compare(case, got, expected, skipped, limits)
    return errors, complaints


def fuzz(seed: int, cases: range, signatures: int = len(SIGNATURES), minutes: float = math.inf) -> dict[str, Any]:
    """Counts, the worst error of every dtype and tensor, and the cases that failed; no new case after so many minutes."""
    end, done = time.monotonic() + 60 * minutes, 0
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("call", "backend", "threads", "dtype", "regime", "layout")}
    worst: dict[str, dict[str, float]] = {dtype: {} for dtype in TOLERANCE}
    failures: list[dict[str, Any]] = []
    for number in cases:
        if time.monotonic() > end:
            break
        done += 1
        case = draw(seed, number, signatures)
        errors, complaints = check(case)
        for name, counter in counts.items():
            counter[str(getattr(case, name))] += 1
        for name, error in errors.items():
            worst[case.dtype][name] = max(worst[case.dtype].get(name, 0.0), error)
        if complaints:
            failures.append({"number": number, "case": str(case), "complaints": complaints})
    return {
        "seed": seed,
        "cases": done,
        "counts": {name: dict(sorted(counter.items())) for name, counter in counts.items()},
        "tolerance": TOLERANCE,
        "float32 where a float32 loop in NumPy is off too": f"{CONDITIONING} times its error",
        "worst error": {
            dtype: {name: float(f"{error:.2g}") for name, error in sorted(errors.items())} for dtype, errors in worst.items()
        },
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case; nothing is written if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no new case is begun after that time")
    options = parser.parse_args()
    start = time.perf_counter()
    result = fuzz(options.seed, range(options.first, options.first + options.cases), minutes=options.minutes)
    for failure in result["failures"][:20]:
        print(failure["number"], failure["case"], *failure["complaints"], sep="\n  ")
    result["versions"] = {name: version(name) for name in ("torch", "numba", "numpy")}
    result["seconds"] = round(time.perf_counter() - start)
    print(f"{result['cases']} cases, {len(result['failures'])} failures, {result['seconds']} s; worst: {result['worst error']}")
    if not options.first:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return bool(result["failures"])


if __name__ == "__main__":
    sys.exit(main())
