"""Small matrix exponentials: ours against `torch.linalg.matrix_exp`, as they are and as right actions, and the split product.

Data path: M generators [M, P, P] (for right actions M coordinates and steps) and a cotangent [M, P, P] -> values and
gradients by each candidate, held against float64: `torch.linalg.matrix_exp`, and for the split product the product of its
factors' exponentials on the first few -> times in turn. What stands `beside` a candidate of ours is torch's way to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gate import check
from benchmarks.timer import first_call, interleave

# Split products that are checked: sixteen dense exponentials for each make the reference slow.
_CHECKED = 1024
# Wider ones have no kernel of their own.
_WIDEST_SPLIT = 8
TORCH = "torch.linalg.matrix_exp"


def measure(*, num_matrices: int = 131072, width: int = 4, rounds: int, budget: float) -> dict[str, Any]:
    """Times and error ratios of `num_matrices` right actions [P, P], float32.

    Args:
        num_matrices: how many at once.
        width: P.
        rounds: calls of each candidate at most.
        budget: seconds per candidate and pass.
    """
    from shippo_ssm.actions import Dissipative, Orthogonal, SplitFlow, expm

    generator = torch.Generator().manual_seed(0)
    matrices = 0.3 * torch.randn(num_matrices, width, width, generator=generator)
    cotangent = torch.randn(num_matrices, width, width, generator=generator)
    split = SplitFlow(width)
    coordinates = 0.3 * torch.randn(num_matrices, split.num_coordinates, generator=generator)
    step = torch.rand(num_matrices, generator=generator)

    def product(coords: Tensor, step: Tensor) -> Tensor:
        result = torch.eye(width, dtype=coords.dtype)
        # The diagonal comes first and only shrinks.
        raw = torch.cat([-F.softplus(coords[..., :width]), coords[..., width:]], dim=-1)
        for factor, coef in zip(split.factors, (raw * step.unsqueeze(-1)).unbind(-1)):
            result = result @ torch.linalg.matrix_exp(coef[..., None, None] * factor.generator.to(coef))
        return result

    dense = torch.linalg.matrix_exp
    functions: list[tuple[str, Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...], int]] = [
        ("shippo expm", expm, dense, (matrices,), num_matrices),
        (TORCH, dense, dense, (matrices,), num_matrices),
    ]
    if width <= _WIDEST_SPLIT:
        functions.append(("shippo SplitFlow", split, product, (coordinates, step), _CHECKED))
    for family in (Orthogonal(width), Dissipative(width)):

        def by_torch(coords: Tensor, step: Tensor, family: Any = family) -> Tensor:
            return dense(family.generator(coords) * step[..., None, None])

        name = type(family).__name__
        given = (0.3 * torch.randn(num_matrices, family.num_coordinates, generator=generator), step)
        functions += [
            (f"shippo {name}", family, by_torch, given, num_matrices),
            (f"{TORCH}, {name}", by_torch, by_torch, given, num_matrices),
        ]
    names = [name for name, *_ in functions]
    records: dict[str, Any] = {}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "both": {}}
    for name, function, exact, inputs, checked in functions:
        some = tuple(tensor[:checked].double() for tensor in inputs)
        want = value_and_gradients(exact, some, cotangent[:checked].double())
        both = _bind(value_and_gradients, function, inputs, cotangent)
        results, seconds = first_call(both)
        errors = check(name, {key: result[:checked] for key, result in results.items()}, want)
        records[name] = {"errors": errors, "first_call": seconds}
        own = name.removeprefix("shippo ")
        beside = TORCH if own == "expm" else f"{TORCH}, {own}"
        if own != name and beside in names:
            records[name]["beside"] = beside
        calls["forward"][name], calls["both"][name] = _bind(_value, function, inputs), both
        calls["forward"][name]()
    for scan_pass, named in calls.items():
        for name, timing in interleave(named, rounds=rounds, budget=budget).items():
            records[name][scan_pass] = timing.as_dict()
    return {"num_matrices": num_matrices, "width": width, "threads": torch.get_num_threads(), "candidates": records}


def value_and_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], cotangent: Tensor) -> dict[str, Tensor]:
    """The function's value and the gradient of <value, cotangent> with respect to each input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    value = function(*leaves)
    gradients = torch.autograd.grad(value, leaves, cotangent)
    return {"value": value.detach(), **{f"gradient {i}": gradient for i, gradient in enumerate(gradients)}}


def _value(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return function(*inputs)


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)
