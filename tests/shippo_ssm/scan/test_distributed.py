"""The scan over 1 to 4 gloo processes is the scan of one: outputs, last state and all gradients; and what it refuses."""

import contextlib
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shippo_ssm.scan import Recurrence, resolve_backend, transport_scan
from tests.distributed import Pool, cut
from tests.shippo_ssm.scan.conftest import REGIMES, TOLERANCE, make_recurrence, rms_ratio, with_state

KINDS = ("equal", "empty first", "empty middle", "empty last")


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def run_whole(recurrence, state, bounds=None, backend="auto"):
    """What one process gives, with gradients for fixed cotangents on y and on the last state."""
    leaves = leaves_of(*recurrence[:6], state)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    y, last = with_state(
        transport_scan(*leaves[:6], initial_state=leaves[6], output_final_state=True, cu_seqlens=cu_seqlens, backend=backend)
    )
    return y, last, leaves


def leaves_of(*tensors) -> list[Any]:
    """Copies that gradients are asked of; what is not there stays so."""
    return [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]


def cotangents(y, last):
    random = torch.Generator().manual_seed(5)
    return [torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(tensor.dtype) for tensor in (y, last)]


def compare(group, case, dtype, kind, bounds=None, backend="auto", final=True):
    """The largest RMS ratio of anything on this rank's part against one process in float64; without the last state where it
    is not asked for."""
    recurrence, state = make_recurrence(**case)
    y, last, leaves = run_whole(recurrence, state, bounds)
    on_y, on_last = cotangents(y, last)
    on_last = on_last if final else torch.zeros_like(on_last)
    expected = torch.autograd.grad(
        [y, last], [leaf for leaf in leaves if leaf is not None], [on_y, on_last], materialize_grads=True
    )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    low, high = cut(recurrence.value.shape[1], size, kind)[rank : rank + 2]
    local = recurrence.map(lambda tensor: tensor.to(dtype)).between(low, high)
    own = leaves_of(*local[:6], state.to(dtype))
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    options = {"initial_state": own[6], "output_final_state": final, "cu_seqlens": cu_seqlens, "backend": backend}
    got_y, got_last = transport_scan(*own[:6], **options, group=group)
    assert (got_last is not None) == final
    loss = (got_y * on_y[:, low:high].to(dtype)).sum()
    # The loss is the sum over the ranks: the last state is weighed on one of them alone.
    if got_last is not None:
        loss = loss + (rank == size - 1) * (got_last * on_last.to(dtype)).sum()
    gradients = torch.autograd.grad(loss, [leaf for leaf in own if leaf is not None], materialize_grads=True)
    named = {"y": (got_y, y[:, low:high])} | ({} if got_last is None else {"last": (got_last, last)})
    for index, (got, whole) in enumerate(zip(gradients, expected)):
        if (
            whole.shape[1:2] == on_y.shape[1:2]
            and whole.ndim > 2
            and got.shape[0] == on_y.shape[0]
            and index != len(expected) - 1
        ):
            whole = whole[:, low:high]
        else:
            dist.all_reduce(got, group=group)
        named[f"gradient {index}"] = (got, whole)
    for name, (got, whole) in named.items():
        assert got.shape == whole.shape, name
    return {name: rms_ratio(got, whole) if got.numel() else 0.0 for name, (got, whole) in named.items()}


def check_regimes(group, length):
    found = {}
    for regime, right, dtype in product(REGIMES, (True, False), TOLERANCE):
        case = {"regime": regime, "right": right, "T": length, "B": 1 if length > 100 else 2}
        kind = KINDS[(length + len(found)) % 4]
        found[regime, right, str(dtype), kind] = max(compare(group, case, dtype, kind).values()) / TOLERANCE[dtype]
    return found


@pytest.mark.parametrize("length", [1, 7, 64, 1000, 4097])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_equal_one_process(pool, size, length):
    for found in pool.run(check_regimes, size, length):
        assert max(found.values()) <= 1, found


def check_variants(group):
    cases = [
        {"T": 20, "rank": 2, "varying": True, "G": 4, "Q": 2},
        {"T": 20, "B": 1, "states": 5, "bounds": (0, 3, 3, 12, 19, 20)},
        {"T": 20, "B": 1, "states": 2, "bounds": (0, 20, 20), "right": False, "Q": 1},
    ]
    found = {}
    backends = [("auto", True), ("auto", False), ("reference", True), ("chunked", True)]
    for case, kind, (backend, final) in product(cases, KINDS, backends):
        case = dict(case)
        bounds = case.pop("bounds", None)
        compared = compare(group, case, torch.float64, kind, bounds, backend, final)
        found[str(case), kind, backend, final] = max(compared.values())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_packed_sequences_cross_ranks_on_any_backend(pool, size):
    for found in pool.run(check_variants, size):
        assert max(found.values()) <= 1e-10, found


def check_half(group):
    recurrence, state = make_recurrence(T=21, dtype=torch.bfloat16)
    y, last, _ = run_whole(recurrence, state)
    low, high = cut(21, 3, "equal")[dist.get_rank(group) :][:2]
    got, got_last = transport_scan(
        *recurrence.between(low, high)[:6], initial_state=state, output_final_state=True, group=group
    )
    assert got_last is not None
    assert (got.dtype, got_last.dtype) == (torch.bfloat16, torch.float32)
    return rms_ratio(got, y[:, low:high]), rms_ratio(got_last, last)


def test_half_precision(pool):
    for on_y, on_last in pool.run(check_half, 3):
        assert on_y < 1e-2
        assert on_last < 1e-5


def operands(group, **changes):
    sizes: dict[str, Any] = {"B": 2, "T": 3 + dist.get_rank(group), "G": 2, "N": 5, "P": 3} | changes
    recurrence, state = make_recurrence(**sizes)
    return recurrence, state


def attempt(group, kind):
    """What a rank says where the first one was given something else; it must not hang."""
    odd = dist.get_rank(group) == 0
    sizes = {"B": {"B": 3}, "G": {"G": 1}, "Q": {"Q": 1}, "N": {"N": 4}, "P": {"P": 2}}.get(kind, {}) if odd else {}
    packed = kind.startswith("cu_seqlens")
    recurrence, state = operands(group, **sizes, **({"B": 1} if packed else {}))
    options: dict[str, Any] = {"initial_state": state, "group": group}
    if kind == "dtype" and odd:
        recurrence, options["initial_state"] = recurrence.map(torch.Tensor.float), state.float()
    if kind == "right" and odd:
        recurrence = recurrence._replace(right=None)
    if kind == "write" and odd:
        recurrence = recurrence._replace(write=recurrence.write[..., 0])
    if kind == "initial_state" and odd:
        options["initial_state"] = None
    if kind == "requires_grad" and odd:
        recurrence = recurrence._replace(value=recurrence.value.requires_grad_())
    if packed:
        total = sum(3 + rank for rank in range(dist.get_world_size(group)))
        ends = {"cu_seqlens short": total - 1, "cu_seqlens differ": total - odd, "cu_seqlens": total}[kind]
        options["cu_seqlens"] = torch.tensor([0, ends])
    if kind == "double backward":
        value = recurrence.value.requires_grad_()
        y, _ = transport_scan(value, *recurrence[1:6], **options)
        with contextlib.suppress(RuntimeError):
            torch.autograd.grad(y.sum(), value, create_graph=True)
            return "differentiated twice"
        return "refused"
    try:
        transport_scan(*recurrence[:6], **options)
    except ValueError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("B", "`value` has B"),
        ("G", "`value` has G"),
        ("Q", "`write` has Q"),
        ("N", "`write` has N"),
        ("P", "`value` has P"),
        ("dtype", "`value` has dtype"),
        ("right", "`right` is there"),
        ("write", "`write` has"),
        ("initial_state", "`initial_state` is there"),
        ("requires_grad", "a gradient of `value`"),
        ("cu_seqlens short", "`cu_seqlens` ends at"),
        ("cu_seqlens differ", "`cu_seqlens` has checksum"),
    ],
)
def test_every_rank_refuses_what_does_not_fit(pool, kind, named):
    for said in pool.run(attempt, 3, kind):
        assert named in said
        assert "expected" in said


def test_what_fits_runs_and_double_backward_is_refused(pool):
    assert pool.run(attempt, 3, "cu_seqlens") == ["ran"] * 3
    assert pool.run(attempt, 2, "double backward") == ["refused"] * 2


def outside(group):
    """A group of the first two ranks, asked for by all."""
    small: Any = dist.new_group([0, 1])
    recurrence, _ = operands(group)
    try:
        transport_scan(*recurrence[:6], group=small)
    except ValueError as error:
        return str(error)
    return "ran"


def test_a_process_outside_the_group(pool):
    said = pool.run(outside, 4)
    assert said[:2] == ["ran", "ran"]
    assert all("`group`" in text and "not in" in text for text in said[2:])


def test_a_group_needs_torch_distributed():
    recurrence, _ = make_recurrence()
    with pytest.raises(ValueError, match=r"`group` came without torch\.distributed"):
        transport_scan(*recurrence[:6], group=object())  # pyright: ignore[reportArgumentType]
    assert isinstance(recurrence, Recurrence)
    assert resolve_backend(recurrence.value) == "fused"
