"""No crash and no wrong number: bounds from data, long products, results used in place, empty sizes, NaN."""

import subprocess
import sys
from functools import cache

import pytest
import torch

from shippo_ssm import dispatch
from shippo_ssm.scan import Recurrence, api, transport_scan
from shippo_ssm.scan.api import BACKENDS

HOSTILE = """
import itertools, sys, torch
from shippo_ssm.scan import transport_scan

T, G, N, P = 16, 2, 8, 4
value, write, read = torch.randn(1, T, G, P), torch.randn(1, T, G, N), torch.randn(1, T, G, N)
step, drift, right = torch.rand(1, T, G), -torch.rand(G, N), torch.randn(1, T, G, P, P)
odd, way = [torch.tensor(bounds) for bounds in eval(sys.argv[1])], sys.argv[2]

def run(value, bounds):
    y, state = transport_scan(value, write, read, step, drift, right, cu_seqlens=bounds, output_final_state=True)
    return y.sum() + state.sum()

good = torch.tensor([0, 8, T])
if way == "compile":
    call = torch.compile(run, backend="aot_eager")
elif way == "export":
    class Module(torch.nn.Module):
        def forward(self, value, bounds):
            return run(value, bounds)
    call = torch.export.export(Module(), (value, good)).module()
elif way == "vmap":
    mapped = torch.func.vmap(run)
    call = lambda value, bounds: mapped(value[None], bounds[None])
else:
    call = run
assert call(value, good).isfinite().all()
for bounds, grads in itertools.product(odd, (False, True)):
    try:
        out = call(value.requires_grad_(grads), bounds)
        out.sum().backward() if grads else None
    except (ValueError, RuntimeError) as error:
        assert "cu_seqlens" in str(error), error
    else:
        raise SystemExit("accepted")
"""


@pytest.mark.parametrize("way", ["eager", "compile", "vmap", "export"])
def test_invalid_bounds_raise_and_touch_nothing(way):
    # The exported program and the compiled one have their number of sequences.
    last = "[0, 12, 4, 16]" if way == "eager" else "[0, 20, 16]"
    bounds = f"[[0, 8, 1 << 22], [0, -(1 << 22), 16], [-(1 << 40), 8, 16], {last}]"
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, bounds, way], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def balanced_case(growth, drift, length, dtype=torch.float64, width=4):
    """Right actions that grow, left factors that decay: each product leaves the range of its dtype, the state does not."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    right = growth * torch.linalg.qr(normal(1, length, 1, width, width))[0]
    drifts = torch.full((1, 3), drift, dtype=torch.float64)
    value, write, read = normal(1, length, 1, 1, width), normal(1, length, 1, 1, 3), normal(1, length, 1, 3)
    recurrence = Recurrence(value, write, read, torch.ones(1, length, 1, dtype=torch.float64), drifts, right)
    # float32-representable numbers, so that every dtype sees the same ones.
    return recurrence.map(lambda tensor: tensor.float().to(dtype)), normal(1, 1, 3, width).float().to(dtype)


@pytest.fixture(scope="module")
def long_loop(helpers):
    """What the reference loop gives for a balanced case; computed once for all backends."""

    @cache
    def run(growth, drift):
        return helpers.run_with_gradients(*balanced_case(growth, drift, 2100), backend="reference")

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [(1.2, -0.2), (2.0, -0.75), (100.0, -4.7), (0.5, 0.65)], ids=str)
@pytest.mark.parametrize("backend", ["segmented", "segmented, chunked", "chunked", "associative"])
def test_products_that_leave_the_range_of_their_dtype(helpers, long_loop, monkeypatch, backend, case, dtype):
    """A stable recurrence is right by every backend: outputs, last state, and gradients of all operands."""
    if backend == "segmented, chunked":
        monkeypatch.setattr(api, "scan_kernels", lambda value: "")
        backend = "segmented"
    recurrence, state = balanced_case(*case, length=2100)
    expected = long_loop(*case)
    got = helpers.run_with_gradients(recurrence.map(lambda tensor: tensor.to(dtype)), state.to(dtype), backend=backend)
    helpers.assert_agree(got, expected, helpers.TOLERANCE[dtype])


def test_auto_does_not_depend_on_threads(helpers):
    recurrence, state = balanced_case(1.2, -0.2, 4096)
    expected = helpers.run_with_gradients(recurrence, state, backend="reference")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            got = helpers.run_with_gradients(recurrence.map(torch.Tensor.float), state.float())
            helpers.assert_agree(got, expected, helpers.TOLERANCE[torch.float32])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["fused", "segmented", "chunked", "associative", "reference"])
def test_results_can_be_changed_in_place(helpers, backend):
    recurrence, state = helpers.make_recurrence(T=9)
    plain = [tensor.detach().requires_grad_() for tensor in (recurrence.value.squeeze(-2), recurrence.write.squeeze(-2))]
    value, write = plain
    others = recurrence.read, recurrence.step, recurrence.drift, recurrence.right
    gradients = []
    for in_place in (False, True):
        y, last = transport_scan(value, write, *others, initial_state=state, output_final_state=True, backend=backend)
        assert last is not None
        if in_place:
            y += 1
            last.mul_(1)
            y.relu_()
        else:
            y = (y + 1).relu()
        gradients.append(torch.autograd.grad(y.sum() + last.sum(), plain))
    for one, two in zip(*gradients):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("backend", ["fused", "segmented", "chunked", "associative", "reference"])
@pytest.mark.parametrize("sizes", [{"N": 0}, {"P": 0}, {"B": 0}, {"G": 0}, {"T": 0}], ids=str)
def test_empty_sizes(helpers, backend, sizes):
    if backend == "fused" and "P" in sizes:
        backend = "auto"
    recurrence, state = helpers.make_recurrence(**({"T": 4} | sizes))
    got = helpers.run_with_gradients(recurrence, state, backend=backend)
    expected = helpers.run_with_gradients(recurrence, state, backend="reference")
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("backend", ["segmented", "chunked"])
def test_no_sequence_wider_than_the_kernels(helpers, backend):
    recurrence, state = helpers.make_recurrence(B=0, T=4, P=17)
    got = helpers.run_with_gradients(recurrence, state, backend=backend)
    assert got["y"].shape == (0, 4, *recurrence.value.shape[2:3], 17)


@pytest.mark.parametrize(
    ("backend", "P"), [("fused", 3), ("segmented", 3), ("segmented", 17), ("chunked", 3), ("associative", 3)]
)
@pytest.mark.parametrize("name", ["value", "drift"])
def test_an_empty_sequence_keeps_its_state_beside_a_nan(helpers, backend, P, name):
    recurrence, state = helpers.make_recurrence(B=1, states=4, T=6, P=P)
    tensor = getattr(recurrence, name)
    (tensor if tensor.ndim == 2 else tensor[:, :1]).fill_(torch.nan)
    bounds = torch.tensor([0, 0, 3, 6, 6])
    got = helpers.run_with_gradients(recurrence, state, cu_seqlens=bounds, backend=backend)
    expected = helpers.run_with_gradients(recurrence, state, cu_seqlens=bounds, backend="reference")
    for key in ("final_state", "gradient of initial_state"):
        assert torch.equal(got[key][[0, 3]], expected[key][[0, 3]]), key
    assert torch.equal(expected["final_state"][[0, 3]], state[[0, 3]])


def test_a_summary_survives_a_large_decay(helpers):
    """What is written after everything was forgotten is not rounded by the decay before it."""
    recurrence, state = helpers.make_recurrence(B=1, T=5, P=17)
    recurrence.step[:, 2] = 1e6
    _, expected = BACKENDS["reference"](recurrence, state, None)
    _, final = BACKENDS["segmented"](recurrence, state, None)
    torch.testing.assert_close(final, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["value", "write", "step", "right"])
def test_a_nan_outlives_full_forgetting(helpers, name):
    """0 NaN is NaN: a forgotten NaN stays one, in segments as in the loop."""
    recurrence, state = helpers.make_recurrence(regime="strong decay", B=1, G=1, T=2100, dtype=torch.float32)
    getattr(recurrence, name)[:, 10] = torch.nan
    for backend in ("segmented", "fused"):
        y, last = BACKENDS[backend](recurrence, state, None)
        assert last.isnan().all(), backend
        assert y[:, 10:].isnan().all(), backend


def test_auto_maps_few_long_chains(helpers, monkeypatch):
    monkeypatch.setattr(dispatch, "SEGMENT_LENGTH", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    recurrence, _ = helpers.make_recurrence(B=1, G=1, T=20)
    _, write, read, step, drift, right, _ = recurrence
    values = torch.randn(2, *recurrence.value.squeeze(-2).shape, dtype=torch.float64)

    def run(value):
        return transport_scan(value, write.squeeze(-2), read, step, drift, right)[0]

    torch.testing.assert_close(torch.func.vmap(run)(values), torch.stack([run(value) for value in values]))
