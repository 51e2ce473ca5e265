"""exp of skew matrices in closed form, for widths 2, 3 and 4.

With turns t_ij = step theta_ij and the skew generator A = sum_{i<j} t_ij (e_j e_i^T - e_i e_j^T):

    width 2   a plane rotation by t_01
    width 3   Rodrigues' rotation about an axis, by the unit quaternion of half its angle
    width 4   A = A_+ + A_- splits so(4) into two commuting halves with A_+-^2 = -|l_+-|^2 I, so that exp(A) is the product of
              cos|l| I + (sin|l| / |l|) A_+- for both: the left and the right unit quaternion of a rotation of space

Everything needed of an angle x is cos(x) and sin(x) / x as functions of x^2, which are smooth at zero. `squared_angles` and
`rotation_matrix` are plain arithmetic: tensors run through them here, and SIMD lanes in `_rotation_cpu.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shippo_ssm.dispatch import compute_dtype

WIDTHS = (2, 3, 4)


def halves(turns: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The coordinates of A_+ and A_- of a skew matrix of width 4."""
    a, b, c, d, e, f = turns
    return [(x + y) * 0.5 for x, y in ((a, f), (b, -e), (c, d))], [(x - y) * 0.5 for x, y in ((a, f), (b, -e), (c, d))]


def squared_norm(numbers: Sequence[Any]) -> Any:
    total = numbers[0] * numbers[0]
    for number in numbers[1:]:
        total = total + number * number
    return total


def squared_angles(turns: Sequence[Any]) -> list[Any]:
    """x^2 of every angle x of which `rotation_matrix` needs cos(x) and sin(x) / x."""
    if len(turns) == 6:
        return [squared_norm(half) for half in halves(turns)]
    return [squared_norm(turns) * (1.0 if len(turns) == 1 else 0.25)]


def rotation_matrix(turns: Sequence[Any], trig: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The P^2 entries of exp(A), row by row, from t_ij, i < j, and (cos(x), sin(x) / x) for every angle of `squared_angles`."""
    if len(turns) == 1:
        ((cos, ratio),) = trig
        sin = ratio * turns[0]
        return [cos, -sin, sin, cos]
    if len(turns) == 3:
        ((w, ratio),) = trig
        # A v = axis x v for the axis (t_12, -t_02, t_01).
        x, y, z = (ratio * part * 0.5 for part in (turns[2], -turns[1], turns[0]))
        xx, yy, zz, xy, xz, yz, wx, wy, wz = (
            a * b * 2.0 for a, b in ((x, x), (y, y), (z, z), (x, y), (x, z), (y, z), (w, x), (w, y), (w, z))
        )
        return [
            1.0 - (yy + zz), xy - wz, xz + wy,
            xy + wz, 1.0 - (xx + zz), yz - wx,
            xz - wy, yz + wx, 1.0 - (xx + yy),
        ]  # fmt: skip
    left, right = (
        quaternion_matrix(cos, [ratio * part for part in half], sign)
        for (cos, ratio), half, sign in zip(trig, halves(turns), (1, -1))
    )
    out = []
    for i in range(4):
        for j in range(4):
            total = left[i][0] * right[0][j]
            for k in range(1, 4):
                total = total + left[i][k] * right[k][j]
            out.append(total)
    return out


def quaternion_matrix(w: Any, parts: Sequence[Any], sign: int) -> list[list[Any]]:
    """w I + A_+- for the coordinates `parts` of A_+ (`sign` 1) or A_- (`sign` -1)."""
    x, y, z = parts
    # The other three coordinates of the half follow from these: t_23 = +-t_01, t_13 = -+t_02, t_12 = +-t_03.
    f, e, d = (x, -y, z) if sign > 0 else (-x, y, -z)
    return [[w, -x, -y, -z], [x, w, -d, -e], [y, d, w, -f], [z, e, f, w]]


def cosine_and_ratio(square: Tensor) -> tuple[Tensor, Tensor]:
    """cos(x) and sin(x) / x of x^2, differentiable to any order, at zero too: small x take the series."""
    small = square < 0.5
    near, far = torch.where(small, square, torch.zeros_like(square)), torch.where(small, torch.ones_like(square), square)
    root = far.sqrt()
    cos, ratio = torch.zeros_like(square), torch.zeros_like(square)
    for k in range(12, -1, -1):
        cos = cos * near + (-1.0) ** k / math.factorial(2 * k)
        ratio = ratio * near + (-1.0) ** k / math.factorial(2 * k + 1)
    return torch.where(small, cos, root.cos()), torch.where(small, ratio, root.sin() / root)


def rotation(coords: Tensor, step: Tensor, width: int) -> Tensor:
    """R [.., P, P] in torch for coordinates [.., P (P - 1) / 2] and steps [..]."""
    dtype = compute_dtype(coords.dtype)
    turns = (coords.to(dtype) * step.to(dtype).unsqueeze(-1)).unbind(-1)
    trig = [cosine_and_ratio(square) for square in squared_angles(turns)]
    return torch.stack(rotation_matrix(turns, trig), -1).unflatten(-1, (width, width)).to(coords.dtype)
