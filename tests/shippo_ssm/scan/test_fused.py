"""The fused CPU kernels against the reference loop."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from shippo_ssm.scan import Recurrence, fused, reference, scan


@pytest.fixture(autouse=True)
def _threads():
    """No test leaves another number of threads behind."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make(helpers):
    """A record in float32 with the sizes of this file."""
    sizes = {"B": 2, "T": 37, "G": 3, "N": 6, "P": 4, "dtype": torch.float32}
    return lambda **changes: helpers.make_recurrence(**(sizes | changes))


@pytest.mark.parametrize(
    "shape",
    [
        {"N": 32, "P": 4, "dtype": torch.float32},
        {"N": 5, "P": 3, "rank": 2, "varying": True, "dtype": torch.float64},
        {"N": 20, "P": 2, "rank": 3, "right": False, "varying": True, "dtype": torch.float32},
        {"N": 16, "P": 8, "dtype": torch.float32},
        {"N": 9, "P": 1, "right": False, "dtype": torch.float64},
        {"N": 1, "P": 16, "dtype": torch.float64},
        {"N": 16, "P": 6, "rank": 2, "seen": True, "dtype": torch.float32},
        {"N": 16, "P": 4, "G": 36, "Q": 2, "seen": True, "dtype": torch.float32},
        {"N": 5, "P": 8, "G": 6, "Q": 2, "rank": 2, "varying": True, "dtype": torch.float32},
    ],
    ids=str,
)
def test_equals_the_reference_for_every_shape(helpers, make, shape):
    recurrence, state = make(T=19, **shape)
    expected = helpers.run_with_gradients(recurrence.map(Tensor.double), state.double(), backend="reference")
    got = helpers.run_with_gradients(recurrence, state, backend="fused")
    assert all(tensor.dtype == shape["dtype"] for tensor in got.values())
    helpers.assert_agree(got, expected, helpers.TOLERANCE[shape["dtype"]])


@pytest.mark.parametrize("width", [4, 8])
def test_bfloat16_is_read_and_written_by_the_kernels(helpers, make, monkeypatch, width):
    """Only results are rounded, and streamed stores are the same numbers as others."""
    recurrence, state = make(T=19, G=16, Q=1 if width == 4 else 16, N=16, P=width)
    recurrence = recurrence.map(Tensor.bfloat16)
    results = []
    for bytes_streamed in (0, fused._STREAMED):
        monkeypatch.setattr(fused, "_STREAMED", bytes_streamed)
        results.append(helpers.run_with_gradients(recurrence, state, backend="fused"))
    exact = helpers.run_with_gradients(recurrence.map(Tensor.float), state, backend="fused")
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
        of_state = name in ("final_state", "gradient of initial_state")
        assert tensor.dtype == (torch.float32 if of_state else torch.bfloat16), name
        # dy comes in bfloat16 too.
        assert helpers.rms_ratio(tensor.float(), exact[name]) < (1e-6 if name == "final_state" else 6e-3), name


def test_packed_sequences_that_start_from_nothing(helpers, make):
    bounds = torch.tensor([0, 0, 5, 38, 38, 37 + 33, 70], dtype=torch.int32)
    recurrence, _ = make(B=1, T=70)
    expected = helpers.run_with_gradients(recurrence.map(Tensor.double), cu_seqlens=bounds, backend="reference")
    got = helpers.run_with_gradients(recurrence, cu_seqlens=bounds, backend="fused")
    helpers.assert_agree(got, expected, helpers.TOLERANCE[torch.float32])


def test_operands_need_not_be_contiguous(helpers, make):
    recurrence, _ = make()
    strided = recurrence.map(lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1))
    assert not strided.value.is_contiguous()
    plain, ours = (helpers.with_state(scan(given, output_final_state=True)) for given in (recurrence, strided))
    assert all(torch.equal(one, two) for one, two in zip(ours, plain))


@pytest.mark.parametrize(("dtype", "largest", "tolerance"), [(torch.float32, 87.0, 4e-7), (torch.float64, 700.0, 1e-12)])
def test_decay_is_the_exponential(dtype, largest, tolerance):
    rate = torch.linspace(-largest, largest, 2 * 6 * 400, dtype=dtype).view(1, 1, 800, 6)
    one = torch.ones(1, 1, 800, dtype=dtype)
    nothing = torch.zeros(1, 1, 800, 1, 6, dtype=dtype)
    initial_state = torch.ones(1, 800, 6, 4, dtype=dtype)

    def decays(rate):
        identity = torch.eye(4, dtype=dtype).expand(1, 1, 800, 4, 4)
        given = Recurrence(nothing[..., :4], nothing, nothing[..., 0, :], one, rate.view(800, 6), identity)
        return fused.run(given, initial_state)[1][..., 0]

    # The exponent is rounded once before the exponential: relative errors grow with its size.
    error = (decays(rate).double() / torch.exp(rate.double()).view(1, 800, 6) - 1).abs() / (1 + rate.abs().view(1, 800, 6))
    assert error.max() < tolerance
    beyond = torch.tensor([-1e30, -160.0, 160.0, 1e30, float("nan"), 0.0], dtype=dtype).expand(1, 1, 800, 6)
    if dtype == torch.float32:
        assert torch.equal(decays(beyond)[0, 0, [0, 1, 2, 3, 5]], torch.tensor([0.0, 0.0, torch.inf, torch.inf, 1.0]))
    assert decays(beyond)[0, 0, 4].isnan()


def test_a_wiped_memory_leaves_exact_zeros(helpers, make):
    recurrence, state = make(T=40, regime="strong decay")
    results = helpers.run_with_gradients(recurrence, state, backend="fused")
    last = recurrence.write[:, -1].mT * recurrence.value[:, -1]
    assert torch.equal(results["final_state"], last)
    for name in ("step", "drift", "right", "initial_state"):
        gradient = results[f"gradient of {name}"]
        assert torch.equal(gradient, torch.zeros_like(gradient)), name
    assert all(tensor.isfinite().all() for tensor in results.values())


def test_a_cotangent_on_one_output_alone(make):
    recurrence, _ = make()
    for pick in (0, 1):
        leaves = recurrence.map(lambda tensor: tensor.detach().requires_grad_())
        exact = recurrence.map(lambda tensor: tensor.detach().double().requires_grad_())
        ours = torch.autograd.grad(fused.run(leaves)[pick].sum(), leaves.value)[0]
        want = torch.autograd.grad(reference.run(exact)[pick].sum(), exact.value)[0]
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=1e-4)


def test_gradients_without_kept_states_are_the_same(make):
    operands = (*make()[0], None, None)
    y, _, kept = fused._scan(*operands, True)
    again, _, none = fused._scan(*operands, False)
    assert torch.equal(y, again)
    assert none.numel() == 0
    dy = torch.randn_like(y)
    gradients = fused._scan_backward(*operands, kept, dy, None)
    for ours, recomputed in zip(gradients, fused._scan_backward(*operands, none, dy, None)):
        assert torch.equal(ours, recomputed)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(make, packed):
    recurrence, state = make(B=1 if packed else 2, T=5, Q=1 if packed else 3, states=2, seen=True, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 2, 5]) if packed else None
    leaves = [tensor.detach().requires_grad_() for tensor in (*recurrence, state)]
    torch.library.opcheck(fused._scan, (*leaves, cu_seqlens, True))
    operands = (*recurrence, state, cu_seqlens)
    y, final_state, kept = fused._scan(*operands, True)
    torch.library.opcheck(fused._scan_backward, (*operands, kept, torch.randn_like(y), torch.randn_like(final_state)))


def test_compiles_as_one_graph(make):
    leaves = [tensor.requires_grad_() for tensor in make(Q=1)[0][:6]]

    def twice(*given):
        return 2 * fused.run(Recurrence(*given))[0]

    y = torch.compile(twice, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(y, twice(*(tensor.detach() for tensor in leaves)))
    compiled = torch.autograd.grad(y.square().sum(), leaves)
    eager = torch.autograd.grad(twice(*leaves).square().sum(), leaves)
    for ours, want in zip(compiled, eager):
        assert torch.equal(ours, want)


def test_vmap_is_a_loop(make):
    many = [make(seed=seed, Q=1)[0] for seed in range(3)]
    stacked = [torch.stack(tensors).requires_grad_() for tensors in zip(*(recurrence[:6] for recurrence in many))]

    def outputs(*given):
        return fused.run(Recurrence(*given))[0]

    ys = torch.func.vmap(outputs)(*stacked)
    dvalues = torch.autograd.grad(ys.square().sum(), stacked[0])[0]
    for recurrence, y, dvalue in zip(many, ys, dvalues):
        recurrence.value.requires_grad_()
        alone = fused.run(recurrence)[0]
        assert torch.equal(y, alone)
        assert torch.equal(dvalue, torch.autograd.grad(alone.square().sum(), recurrence.value)[0])


def test_second_derivatives_are_refused(make):
    leaves = make()[0].map(lambda tensor: tensor.requires_grad_())
    (gradient,) = torch.autograd.grad(fused.run(leaves)[0].square().sum(), leaves.value, create_graph=True)
    with pytest.raises(RuntimeError, match=r'second derivative.*backend="associative"'):
        gradient.sum().backward()


@pytest.mark.parametrize(("batch", "groups", "sets"), [(1, 9, 9), (5, 9, 9), (1, 36, 1), (3, 36, 2), (20, 6, 2)])
def test_results_do_not_depend_on_the_number_of_threads(helpers, make, batch, groups, sets):
    recurrence, state = make(B=batch, T=50, G=groups, Q=sets)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(helpers.run_with_gradients(recurrence, state, backend="fused"))
    for other in results[1:]:
        for name, tensor in other.items():
            assert torch.equal(tensor, results[0][name]), name


def test_concurrent_calls_from_python_threads(helpers, make):
    torch.set_num_threads(2)
    many = [make(T=200, seed=seed) for seed in range(6)]
    alone = [helpers.run_with_gradients(*given) for given in many]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda given: helpers.run_with_gradients(*given), many * 3))
    for i, results in enumerate(together):
        assert all(torch.equal(tensor, alone[i % 6][name]) for name, tensor in results.items())


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_workers(helpers, make):
    torch.set_num_threads(2)
    given = make(T=200)
    here = helpers.run_with_gradients(*given)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work():
        torch.set_num_threads(2)
        sender.send({name: tensor.numpy() for name, tensor in helpers.run_with_gradients(*given).items()})

    worker = context.Process(target=work)
    worker.start()
    try:
        assert receiver.poll(60), "the forked worker hangs"
        there = receiver.recv()
    finally:
        worker.terminate()
        worker.join()
    assert all(np.array_equal(there[name], tensor.numpy()) for name, tensor in here.items())


@pytest.mark.parametrize(
    ("order", "width", "rank", "right"), [(32, 4, 1, True), (64, 16, 1, False), (64, 8, 2, True), (16, 1, 1, False)]
)
def test_kept_states_are_a_small_part_of_the_operands(order, width, rank, right):
    case = fused.Case("float32", order, width, rank, right, has_seen=False, varying=False, shared=False)
    operands_and_gradients = 2 * ((rank + 1) * (order + width) + 1 + right * width * width)
    assert order * width / case.chunk < 0.1 * operands_and_gradients


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs the peak memory counter of Linux")
@pytest.mark.parametrize("sets", [64, 1])
def test_memory_of_the_backward_pass(make, sets):
    def memory(name):
        return int(pathlib.Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10

    recurrence = make(B=4, T=256, G=64, Q=sets, N=32)[0].map(lambda tensor: tensor.requires_grad_())
    leaves = recurrence[:6]
    size = sum(tensor.nbytes for tensor in leaves)
    for _ in range(2):
        gc.collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        y, _ = fused.run(recurrence)
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        extra = memory("VmHWM") - before - size - 2 * y.nbytes
        del y, gradients
    # The states of chunk boundaries, not one write or read for each group of a set.
    assert extra < (0.25 * 2 * size if sets == 64 else 0.5 * recurrence.write.nbytes * 64), extra / (2 * size)


def test_importing_takes_no_numba():
    code = "import sys, shippo_ssm.scan, shippo_ssm.scan.fused; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
