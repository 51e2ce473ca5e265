"""Right actions for cards, in Triton: exponentials, split products and rotations of many small matrices, with gradients.

A lane of a warp holds one item: a matrix is P^2 numbers, each a tile [BM] over the items of a program, entry (i, j) at
i P + j. Formulas and names are those of `_expm_kernels.py`, `_split_kernels.py` and `rotations.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shippo_ssm.engine._triton_kernels import load_numbers, store_numbers


@triton.jit
def product(a, b, P: tl.constexpr):
    """a b."""
    out = ()
    for i in tl.static_range(P):
        for j in tl.static_range(P):
            total = a[i * P] * b[j]
            for k in tl.static_range(1, P):
                total += a[i * P + k] * b[k * P + j]
            out += (total,)
    return out


@triton.jit
def transposed(a, P: tl.constexpr):
    out = ()
    for i in tl.static_range(P):
        for j in tl.static_range(P):
            out += (a[j * P + i],)
    return out


@triton.jit
def plus(a, b, x, SIZE: tl.constexpr):
    """a + x b, entry by entry."""
    out = ()
    for k in tl.static_range(SIZE):
        out += (a[k] + x * b[k],)
    return out


@triton.jit
def times(a, x, SIZE: tl.constexpr):
    """x a."""
    out = ()
    for k in tl.static_range(SIZE):
        out += (a[k] * x,)
    return out


@triton.jit
def chosen(which, a, b, SIZE: tl.constexpr):
    """a where `which`, else b."""
    out = ()
    for k in tl.static_range(SIZE):
        out += (tl.where(which, a[k], b[k]),)
    return out


@triton.jit
def expm(
    generator, direction, out, count, P: tl.constexpr, FRECHET: tl.constexpr, DEGREE: tl.constexpr, THETA: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """exp(A), or the derivative of exp at A^T along `direction`.

    T = exp(2^-s A) - I by Horner's rule, so that rounding errors are those of the small part; squaring is T <- 2 T + T^2.
    """
    SIZE: tl.constexpr = P * P
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = m < count
    a = load_numbers(generator, m, real, SIZE, DTYPE)
    if FRECHET:
        a = transposed(a, P)
    norm = tl.zeros((BM,), DTYPE)
    for j in tl.static_range(P):
        column = tl.abs(a[j])
        for i in tl.static_range(1, P):
            column += tl.abs(a[i * P + j])
        norm = tl.maximum(norm, column)
    # What is not finite needs no scaling, and stays what it is.
    squarings = tl.where(norm < float("inf"), tl.ceil(tl.log2(tl.maximum(norm / THETA, 1.0))), 0.0)
    a = times(a, tl.exp2(-squarings), SIZE)
    total = times(a, 1.0 / DEGREE, SIZE)
    if FRECHET:
        e = times(load_numbers(direction, m, real, SIZE, DTYPE), tl.exp2(-squarings), SIZE)
        slope = times(e, 1.0 / DEGREE, SIZE)
    power = tl.full((BM,), DEGREE - 1, DTYPE)
    for _ in range(1, DEGREE):
        weight = 1.0 / power
        power -= 1.0
        if FRECHET:
            slope = plus(plus(e, product(e, total, P), 1.0, SIZE), product(a, slope, P), 1.0, SIZE)
            slope = times(slope, weight, SIZE)
        total = times(plus(a, product(a, total, P), 1.0, SIZE), weight, SIZE)
    for k in range(tl.max(squarings, 0).to(tl.int32)):
        going = squarings > k
        if FRECHET:
            turned = plus(product(total, slope, P), product(slope, total, P), 1.0, SIZE)
            slope = chosen(going, plus(turned, slope, 2.0, SIZE), slope, SIZE)
        total = chosen(going, plus(product(total, total, P), total, 2.0, SIZE), total, SIZE)
    if FRECHET:
        store_numbers(out, m, real, slope, SIZE)
    else:
        result = ()
        for k in tl.static_range(SIZE):
            result += (total[k] + (1.0 if k % (P + 1) == 0 else 0.0),)
        store_numbers(out, m, real, result, SIZE)


@triton.jit
def turn(a, i: tl.constexpr, j: tl.constexpr, cos, sin, P: tl.constexpr):
    """Columns i and j of a matrix turned into each other."""
    out = ()
    for row in tl.static_range(P):
        for column in tl.static_range(P):
            entry = a[row * P + column]
            if column == i:
                entry = entry * cos + a[row * P + j] * sin
            elif column == j:
                entry = entry * cos - a[row * P + i] * sin
            out += (entry,)
    return out


@triton.jit
def shear(a, i: tl.constexpr, j: tl.constexpr, coef, P: tl.constexpr):
    """coef times column i added to column j."""
    out = ()
    for row in tl.static_range(P):
        for column in tl.static_range(P):
            entry = a[row * P + column]
            if column == j:
                entry += coef * a[row * P + i]
            out += (entry,)
    return out


@triton.jit
def inner(a, b, i: tl.constexpr, j: tl.constexpr, P: tl.constexpr):
    """<column i of a, column j of b>."""
    total = a[i] * b[j]
    for row in tl.static_range(1, P):
        total += a[row * P + i] * b[row * P + j]
    return total


@triton.jit
def softplus(x, TERMS: tl.constexpr):
    """log(1 + exp(x)) and its derivative; log1p(t) = 2 z (1 + z^2 / 3 + z^4 / 5 + ..) with z = t / (2 + t) <= 1/3."""
    t = tl.exp(-tl.abs(x))
    z = t / (t + 2.0)
    series = tl.zeros_like(x)
    for k in tl.static_range(TERMS - 1, -1, -1):
        series = series * z * z + 2.0 / (2 * k + 1)
    return tl.maximum(x, 0.0) + series * z, tl.where(x < 0, t, 1.0) / (1.0 + t)


@triton.jit
def split(
    coords, step, right, cotangent, d_coords, d_step, count, P: tl.constexpr, BACKWARD: tl.constexpr,
    DIAGONALS: tl.constexpr, ROTATIONS: tl.constexpr, SHEARS: tl.constexpr, LIMIT: tl.constexpr, TERMS: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The split product, or its gradient, which takes the factors off again from the right."""
    SIZE: tl.constexpr = P * P
    NUM_COORDS: tl.constexpr = DIAGONALS + ROTATIONS + SHEARS
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = m < count
    x = load_numbers(coords, m, real, NUM_COORDS, DTYPE)
    h = tl.load(step + m, mask=real, other=0.0).to(DTYPE)
    if not BACKWARD:
        matrix = ()
        for k in tl.static_range(SIZE):
            entry = tl.full((BM,), 1.0 if k % (P + 1) == 0 else 0.0, DTYPE)
            if DIAGONALS and k % (P + 1) == 0:
                entry = tl.exp(-tl.minimum(h * softplus(x[k // (P + 1)], TERMS)[0], LIMIT))
            matrix += (entry,)
        if ROTATIONS:
            for i in tl.static_range(P):
                for j in tl.static_range(i + 1, P):
                    angle = h * x[DIAGONALS + i * P - i * (i + 1) // 2 + j - i - 1]
                    matrix = turn(matrix, i, j, tl.cos(angle), tl.sin(angle), P)
        if SHEARS:
            for i in tl.static_range(P):
                for j in tl.static_range(i + 1, P):
                    coef = h * x[DIAGONALS + ROTATIONS + i * P - i * (i + 1) // 2 + j - i - 1]
                    matrix = shear(matrix, i, j, coef, P)
        store_numbers(right, m, real, matrix, SIZE)
    else:
        matrix, bar = load_numbers(right, m, real, SIZE, DTYPE), load_numbers(cotangent, m, real, SIZE, DTYPE)
        pulled = ()
        if SHEARS:
            for i in tl.static_range(P - 1, -1, -1):
                for j in tl.static_range(P - 1, i, -1):
                    coef = h * x[DIAGONALS + ROTATIONS + i * P - i * (i + 1) // 2 + j - i - 1]
                    pulled = (inner(bar, matrix, j, i, P),) + pulled
                    matrix, bar = shear(matrix, i, j, -coef, P), shear(bar, j, i, coef, P)
        if ROTATIONS:
            for i in tl.static_range(P - 1, -1, -1):
                for j in tl.static_range(P - 1, i, -1):
                    angle = h * x[DIAGONALS + i * P - i * (i + 1) // 2 + j - i - 1]
                    pulled = (inner(bar, matrix, i, j, P) - inner(bar, matrix, j, i, P),) + pulled
                    matrix = turn(matrix, i, j, tl.cos(angle), -tl.sin(angle), P)
                    bar = turn(bar, i, j, tl.cos(angle), -tl.sin(angle), P)
        d_h = tl.zeros((BM,), DTYPE)
        gradient = ()
        if DIAGONALS:
            for i in tl.static_range(P):
                decay, slope = softplus(x[i], TERMS)
                # Where the decay is cut nothing moves it.
                weight = tl.where(h * decay > LIMIT, 0.0, -bar[i * (P + 1)] * tl.exp(-tl.minimum(h * decay, LIMIT)))
                gradient += (weight * h * slope,)
                d_h += weight * decay
        for k in tl.static_range(ROTATIONS + SHEARS):
            gradient += (pulled[k] * h,)
            d_h += pulled[k] * x[DIAGONALS + k]
        store_numbers(d_coords, m, real, gradient, NUM_COORDS)
        tl.store(d_step + m, d_h.to(d_step.dtype.element_ty), mask=real)


@triton.jit
def cosine_and_ratio(square, DTYPE: tl.constexpr):
    """cos(x), sin(x) / x and the derivative of that by x^2, all from x^2; small ones by their series."""
    near = square < 0.5
    s, far = tl.where(near, square, 0.0), tl.where(near, 1.0, square)
    x = tl.sqrt(far)
    cos, ratio = tl.cos(x), tl.sin(x) / x
    slope = (cos - ratio) / (2.0 * far)
    # Terms 0 .. 9 of the three series, by Horner's rule: term k follows from term k - 1 by one factor.
    series_c, series_r, series_s = tl.zeros_like(s), tl.zeros_like(s), tl.zeros_like(s)
    for k in tl.static_range(10, 0, -1):
        series_c = 1.0 - s * series_c * (1.0 / ((2 * k - 1) * (2 * k)))
        series_r = 1.0 - s * series_r * (1.0 / ((2 * k) * (2 * k + 1)))
        series_s = 1.0 - s * series_s * ((k + 1) / (k * (2 * k + 2) * (2 * k + 3)))
    cos, ratio = tl.where(near, series_c, cos), tl.where(near, series_r, ratio)
    # One step of Newton's iteration to cos^2 + sin^2 = 1: what is left is rounding without a preferred sign.
    half = -0.5 * (ratio * ratio * square + (cos * cos - 1.0))
    return cos + cos * half, ratio + ratio * half, tl.where(near, series_s * (-1.0 / 6.0), slope)


@triton.jit
def quaternion(w, x, y, z, SIGN: tl.constexpr):
    """w I + A_+- for the coordinates (x, y, z) of A_+ (SIGN 1) or A_- (SIGN -1), 4 x 4."""
    f, e, d = SIGN * x, -SIGN * y, SIGN * z
    return (w, -x, -y, -z, x, w, -d, -e, y, d, w, -f, z, e, f, w)


@triton.jit
def pull_half(a, b, c, cos, ratio, slope, x, SIGN: tl.constexpr):
    """The gradient of the half (a, b, c) from that of its quaternion matrix, x: 4 x 4."""
    d_cos = x[0] + x[5] + x[10] + x[15]
    d_a = x[4] - x[1] - SIGN * (x[11] - x[14])
    d_b = x[8] - x[2] + SIGN * (x[7] - x[13])
    d_c = x[12] - x[3] - SIGN * (x[6] - x[9])
    # Twice the derivative by the squared angle; d cos(x) / d(x^2) = -sin(x) / (2 x).
    turned = 2.0 * slope * (a * d_a + b * d_b + c * d_c) - ratio * d_cos
    return ratio * d_a + turned * a, ratio * d_b + turned * b, ratio * d_c + turned * c


@triton.jit
def rotation(
    coords, step, right, cotangent, d_coords, d_step, count, P: tl.constexpr, BACKWARD: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """exp of skew matrices of width 2, 3 or 4, all as rotations of four dimensions, or its gradient."""
    NUM_COORDS: tl.constexpr = P * (P - 1) // 2
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = m < count
    x = load_numbers(coords, m, real, NUM_COORDS, DTYPE)
    h = tl.load(step + m, mask=real, other=0.0).to(DTYPE)
    zero = tl.zeros((BM,), DTYPE)
    t01 = h * x[0]
    t02 = h * x[1] if P > 2 else zero
    t03 = h * x[2] if P > 3 else zero
    t12 = h * x[P - 1] if P > 2 else zero
    t13 = h * x[4] if P > 3 else zero
    t23 = h * x[5] if P > 3 else zero
    a, b, c = 0.5 * (t01 + t23), 0.5 * (t02 - t13), 0.5 * (t03 + t12)
    d, e, f = 0.5 * (t01 - t23), 0.5 * (t02 + t13), 0.5 * (t03 - t12)
    cos_l, ratio_l, slope_l = cosine_and_ratio(a * a + b * b + c * c, DTYPE)
    cos_r, ratio_r, slope_r = cosine_and_ratio(d * d + e * e + f * f, DTYPE)
    left = quaternion(cos_l, ratio_l * a, ratio_l * b, ratio_l * c, 1)
    other = quaternion(cos_r, ratio_r * d, ratio_r * e, ratio_r * f, -1)
    if not BACKWARD:
        whole = product(left, other, 4)
        matrix = ()
        for i in tl.static_range(P):
            for j in tl.static_range(P):
                matrix += (whole[i * 4 + j],)
        store_numbers(right, m, real, matrix, P * P)
    else:
        given = load_numbers(cotangent, m, real, P * P, DTYPE)
        bar = ()
        for i in tl.static_range(4):
            for j in tl.static_range(4):
                bar += (given[i * P + j] if i < P and j < P else zero,)
        d_a, d_b, d_c = pull_half(a, b, c, cos_l, ratio_l, slope_l, product(bar, transposed(other, 4), 4), 1)
        d_d, d_e, d_f = pull_half(d, e, f, cos_r, ratio_r, slope_r, product(transposed(left, 4), bar, 4), -1)
        if P == 2:
            pulled = (0.5 * (d_a + d_d),)
        elif P == 3:
            pulled = (0.5 * (d_a + d_d), 0.5 * (d_b + d_e), 0.5 * (d_c - d_f))
        else:
            pulled = (
                0.5 * (d_a + d_d), 0.5 * (d_b + d_e), 0.5 * (d_c + d_f),
                0.5 * (d_c - d_f), 0.5 * (d_e - d_b), 0.5 * (d_a - d_d),
            )  # fmt: skip
        d_h = zero
        for k in tl.static_range(NUM_COORDS):
            d_h += pulled[k] * x[k]
        store_numbers(d_coords, m, real, times(pulled, h, NUM_COORDS), NUM_COORDS)
        tl.store(d_step + m, d_h.to(d_step.dtype.element_ty), mask=real)
