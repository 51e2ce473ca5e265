"""Right actions for cards, in Triton: exponentials, split products and rotations of many small matrices, with gradients.

Up to P = 4 a lane of a warp holds one item: a matrix is P^2 numbers, each a tile [BM] over the items of a program, entry (i, j)
at i P + j. Wider matrices would not fit there. `wide_expm` holds them as tiles [BM, BP, BP], filled to a power of two with
zeros, which stay so; `wide_split` as P columns, tiles [BM, BP] with a row in a lane, since a factor touches two columns of a
matrix and every row alike. Formulas and names are those of `_expm_kernels.py`, `_split_kernels.py` and `rotations.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shippo_ssm.engine._triton_kernels import bind, filled, load_numbers, load_state, padded, store_numbers, store_state, unbind


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
    row, m = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM)
    real = row + m < count
    a = load_numbers(generator, row, m, real, SIZE, DTYPE)
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
        e = times(load_numbers(direction, row, m, real, SIZE, DTYPE), tl.exp2(-squarings), SIZE)
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
        store_numbers(out, row, m, real, slope, SIZE)
    else:
        result = ()
        for k in tl.static_range(SIZE):
            result += (total[k] + (1.0 if k % (P + 1) == 0 else 0.0),)
        store_numbers(out, row, m, real, result, SIZE)


@triton.jit
def tile_product(a, b):
    """a b of tiles [BM, BP, BP]."""
    return tl.sum(a[:, :, :, None] * b[:, None, :, :], 2)


@triton.jit
def wide_expm(
    generator, direction, out, count, P: tl.constexpr, FRECHET: tl.constexpr, DEGREE: tl.constexpr, THETA: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The same as `expm` for wide matrices."""
    BP: tl.constexpr = padded(P)
    row, m, i = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM)[:, None, None], tl.arange(0, BP)
    at = row * (P * P) + (m * P + i[None, :, None]) * P + i[None, None, :]
    real = (row + m < count) & (i < P)[None, :, None] & (i < P)[None, None, :]
    a = tl.load(generator + at, mask=real, other=0.0).to(DTYPE)
    if FRECHET:
        a = tl.permute(a, (0, 2, 1))
    norm = tl.max(tl.sum(tl.abs(a), 1), 1)
    squarings = tl.where(norm < float("inf"), tl.ceil(tl.log2(tl.maximum(norm / THETA, 1.0))), 0.0)[:, None, None]
    a *= tl.exp2(-squarings)
    total = a * (1.0 / DEGREE)
    if FRECHET:
        e = tl.load(direction + at, mask=real, other=0.0).to(DTYPE) * tl.exp2(-squarings)
        slope = e * (1.0 / DEGREE)
    power = tl.full((BM, 1, 1), DEGREE - 1, DTYPE)
    for _ in range(1, DEGREE):
        if FRECHET:
            slope = (e + tile_product(e, total) + tile_product(a, slope)) / power
        total = (a + tile_product(a, total)) / power
        power -= 1.0
    for k in range(tl.max(tl.max(tl.max(squarings, 0), 0), 0).to(tl.int32)):
        going = squarings > k
        if FRECHET:
            slope = tl.where(going, 2.0 * slope + (tile_product(total, slope) + tile_product(slope, total)), slope)
        total = tl.where(going, 2.0 * total + tile_product(total, total), total)
    if FRECHET:
        result = slope
    else:
        result = total + tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0).to(DTYPE)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real)


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
    row, m = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM)
    real = row + m < count
    x = load_numbers(coords, row, m, real, NUM_COORDS, DTYPE)
    h = tl.load(step + row + m, mask=real, other=0.0).to(DTYPE)
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
        store_numbers(right, row, m, real, matrix, SIZE)
    else:
        matrix, bar = load_numbers(right, row, m, real, SIZE, DTYPE), load_numbers(cotangent, row, m, real, SIZE, DTYPE)
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
        store_numbers(d_coords, row, m, real, gradient, NUM_COORDS)
        tl.store(d_step + row + m, d_h.to(d_step.dtype.element_ty), mask=real)


@triton.jit
def line(m, real, i: tl.constexpr, FIRST: tl.constexpr, NUM_COORDS: tl.constexpr, P: tl.constexpr):
    """Where the coordinates of the pairs (i, i + 1), (i, i + 2), .. lie, and which are meant; that of (0, 1) is at FIRST."""
    k = tl.arange(0, padded(P - 1 - i))
    at = m[:, None] * NUM_COORDS + (FIRST + i * P - i * (i + 1) // 2 + k)[None, :]
    return at, real[:, None] & (k < P - 1 - i)[None, :]


@triton.jit
def pick(tile, k: tl.constexpr):
    """Column k of a tile, as a sum: what it is made of, a sine say, stays with the lane that has computed it."""
    return tl.sum(tl.where((tl.arange(0, tile.shape[1]) == k)[None, :], tile, 0.0), 1)


@triton.jit
def pair_put(columns, i: tl.constexpr, j: tl.constexpr, a, b):
    """The columns with a and b in the places i < j."""
    return columns[:i] + (a,) + columns[i + 1 : j] + (b,) + columns[j + 1 :]


@triton.jit
def turn_columns(columns, i: tl.constexpr, j: tl.constexpr, cos, sin):
    """Columns i < j turned into each other."""
    a, b = columns[i], columns[j]
    return pair_put(columns, i, j, a * cos[:, None] + b * sin[:, None], b * cos[:, None] - a * sin[:, None])


@triton.jit
def wide_split(
    coords, step, right, cotangent, d_coords, d_step, count, P: tl.constexpr, BACKWARD: tl.constexpr,
    DIAGONALS: tl.constexpr, ROTATIONS: tl.constexpr, SHEARS: tl.constexpr, LIMIT: tl.constexpr, TERMS: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The same as `split` for wide matrices."""
    NUM_COORDS: tl.constexpr = DIAGONALS + ROTATIONS + SHEARS
    row, m, n = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, padded(P))
    real = row + m < count
    coords += row * NUM_COORDS
    h = tl.load(step + row + m, mask=real, other=0.0).to(DTYPE)
    whole = real[:, None] & (n < P)[None, :]
    # Entry (n, n) of the diagonal factors lies where row n is.
    decay, fade = tl.zeros((BM, padded(P)), DTYPE), tl.full((BM, padded(P)), 1.0, DTYPE)
    slope = decay
    if DIAGONALS:
        x = tl.load(coords + m[:, None] * NUM_COORDS + n[None, :], mask=whole, other=0.0).to(DTYPE)
        decay, slope = softplus(x, TERMS)
        fade = tl.exp(-tl.minimum(h[:, None] * decay, LIMIT))
    if not BACKWARD:
        matrix = ()
        for q in tl.static_range(P):
            matrix += (tl.where((n == q)[None, :], fade, 0.0),)
        if ROTATIONS:
            for i in tl.static_range(P - 1):
                at, here = line(m, real, i, DIAGONALS, NUM_COORDS, P)
                angles = h[:, None] * tl.load(coords + at, mask=here, other=0.0).to(DTYPE)
                cos, sin = tl.cos(angles), tl.sin(angles)
                for j in tl.static_range(i + 1, P):
                    matrix = turn_columns(matrix, i, j, pick(cos, j - i - 1), pick(sin, j - i - 1))
        if SHEARS:
            for i in tl.static_range(P - 1):
                at, here = line(m, real, i, DIAGONALS + ROTATIONS, NUM_COORDS, P)
                coefs = unbind(h[:, None] * tl.load(coords + at, mask=here, other=0.0).to(DTYPE), padded(P - 1 - i))
                for j in tl.static_range(i + 1, P):
                    matrix = pair_put(matrix, i, j, matrix[i], matrix[j] + coefs[j - i - 1][:, None] * matrix[i])
        store_state(right, row, m, n, real, matrix, P, P)
    else:
        matrix, bar = load_state(right, row, m, n, real, P, P, DTYPE), load_state(cotangent, row, m, n, real, P, P, DTYPE)
        d_coords += row * NUM_COORDS
        d_h = tl.zeros((BM,), DTYPE)
        if SHEARS:
            for i in tl.static_range(P - 2, -1, -1):
                at, here = line(m, real, i, DIAGONALS + ROTATIONS, NUM_COORDS, P)
                x = tl.load(coords + at, mask=here, other=0.0).to(DTYPE)
                coefs, pulled = unbind(h[:, None] * x, padded(P - 1 - i)), ()
                for j in tl.static_range(P - 1, i, -1):
                    coef = coefs[j - i - 1][:, None]
                    pulled = (tl.sum(bar[j] * matrix[i], 1),) + pulled
                    matrix = pair_put(matrix, i, j, matrix[i], matrix[j] - coef * matrix[i])
                    bar = pair_put(bar, i, j, bar[i] + coef * bar[j], bar[j])
                tile = bind(filled(pulled, P - 1 - i), 0, 1, padded(P - 1 - i))
                tl.store(d_coords + at, (tile * h[:, None]).to(d_coords.dtype.element_ty), mask=here)
                d_h += tl.sum(tile * x, 1)
        if ROTATIONS:
            for i in tl.static_range(P - 2, -1, -1):
                at, here = line(m, real, i, DIAGONALS, NUM_COORDS, P)
                x = tl.load(coords + at, mask=here, other=0.0).to(DTYPE)
                cos, sin, pulled = tl.cos(h[:, None] * x), -tl.sin(h[:, None] * x), ()
                for j in tl.static_range(P - 1, i, -1):
                    c, s = pick(cos, j - i - 1), pick(sin, j - i - 1)
                    pulled = (tl.sum(bar[i] * matrix[j] - bar[j] * matrix[i], 1),) + pulled
                    matrix, bar = turn_columns(matrix, i, j, c, s), turn_columns(bar, i, j, c, s)
                tile = bind(filled(pulled, P - 1 - i), 0, 1, padded(P - 1 - i))
                tl.store(d_coords + at, (tile * h[:, None]).to(d_coords.dtype.element_ty), mask=here)
                d_h += tl.sum(tile * x, 1)
        if DIAGONALS:
            weight = tl.zeros((BM, padded(P)), DTYPE)
            for q in tl.static_range(P):
                weight += tl.where((n == q)[None, :], bar[q], 0.0)
            # Where the decay is cut nothing moves it.
            weight = tl.where(h[:, None] * decay > LIMIT, 0.0, -weight * fade)
            gradient = weight * h[:, None] * slope
            tl.store(d_coords + m[:, None] * NUM_COORDS + n[None, :], gradient.to(d_coords.dtype.element_ty), mask=whole)
            d_h += tl.sum(weight * decay, 1)
        tl.store(d_step + row + m, d_h.to(d_step.dtype.element_ty), mask=real)


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
    row, m = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM)
    real = row + m < count
    x = load_numbers(coords, row, m, real, NUM_COORDS, DTYPE)
    h = tl.load(step + row + m, mask=real, other=0.0).to(DTYPE)
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
        store_numbers(right, row, m, real, matrix, P * P)
    else:
        given = load_numbers(cotangent, row, m, real, P * P, DTYPE)
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
        store_numbers(d_coords, row, m, real, times(pulled, h, NUM_COORDS), NUM_COORDS)
        tl.store(d_step + row + m, d_h.to(d_step.dtype.element_ty), mask=real)
