"""The fused CPU kernels against the reference loop, and the machinery that compiles, keeps and runs them."""

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

from shippo_ssm import _numba
from shippo_ssm.scan import fused, reference

NAMES = ("value", "write", "read", "step", "drift", "right", "initial_state")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
RATES = {"contracting": (-2.0, 0.0), "near-unit": (-1e-3, 0.0), "strong gate": (-300.0, 0.0), "expanding": (0.0, 0.05)}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What the kernels fail to write shows up as NaN; and no test leaves another number of threads behind."""
    monkeypatch.setattr(fused, "_allocate", lambda like, shape: like.new_full(shape, float("nan")))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def operands(
    batch=2, length=37, groups=3, order=6, width=4, *, rank=None, right=True, varying=False, dtype=torch.float32,
    regime="contracting", seed=0,
) -> list[Tensor | None]:  # fmt: skip
    """value, write, read, step, drift, right of one regime."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    ranks = () if rank is None else (rank,)
    low, high = RATES[regime]
    tensors = [
        normal(batch, length, groups, *ranks, width),
        normal(batch, length, groups, *ranks, order),
        normal(batch, length, groups, order),
        uniform(batch, length, groups),
        low + (high - low) * uniform(*((batch, length) if varying else ()), groups, order),
        torch.linalg.matrix_exp(0.3 * normal(batch, length, groups, width, width) / width) if right else None,
    ]
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def results_and_gradients(scan, tensors, initial_state=None, cu_seqlens=None, seed=1) -> dict[str, Tensor]:
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (*tensors, initial_state)]
    outputs = scan.transport_scan(*leaves[:6], initial_state=leaves[6], output_final_state=True, cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outputs]
    given = {name: leaf for name, leaf in zip(NAMES, leaves) if leaf is not None}
    # The loop never touches the gates of an empty sequence: their gradient is zero, not missing.
    gradients = torch.autograd.grad(outputs, list(given.values()), cotangents, allow_unused=True, materialize_grads=True)
    results = {"y": outputs[0], "final_state": outputs[1], **{f"d{n}": g for n, g in zip(given, gradients)}}
    return {name: tensor.detach() for name, tensor in results.items()}


def assert_equals_reference(tensors, initial_state=None, cu_seqlens=None):
    dtype = tensors[0].dtype
    exact = [None if tensor is None else tensor.double() for tensor in (*tensors, initial_state)]
    ours = results_and_gradients(fused, tensors, initial_state, cu_seqlens)
    expected = results_and_gradients(reference, exact[:6], exact[6], cu_seqlens)
    assert ours.keys() == expected.keys()
    for name, want in expected.items():
        assert ours[name].dtype == dtype
        assert ours[name].shape == want.shape, name
        error = (ours[name] - want).square().mean().sqrt()
        assert error <= TOLERANCE[dtype] * want.square().mean().sqrt(), (name, error)


@pytest.mark.parametrize("regime", RATES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_reference_in_every_regime(dtype, regime):
    tensors = operands(dtype=dtype, regime=regime)
    assert_equals_reference(tensors, torch.randn(2, 3, 6, 4, dtype=dtype))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 100])
def test_equals_the_reference_at_every_length(length):
    assert_equals_reference(operands(length=length))


@pytest.mark.parametrize(
    "shape",
    [
        {"order": 32, "width": 4, "dtype": torch.float32},
        {"order": 5, "width": 3, "rank": 2, "varying": True, "dtype": torch.float64},
        {"order": 20, "width": 2, "rank": 3, "right": False, "varying": True, "dtype": torch.float32},
        {"order": 16, "width": 8, "dtype": torch.float32},
        {"order": 9, "width": 1, "right": False, "dtype": torch.float64},
        {"order": 1, "width": 16, "dtype": torch.float64},
    ],
    ids=str,
)
def test_equals_the_reference_for_every_shape(shape):
    tensors = operands(length=19, **shape)
    initial_state = torch.randn(2, 3, shape["order"], shape["width"], dtype=shape["dtype"])
    assert_equals_reference(tensors, initial_state)


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences(with_state):
    cu_seqlens = torch.tensor([0, 0, 5, 38, 38, 37 + 33, 70], dtype=torch.int32)
    tensors = operands(batch=1, length=70)
    initial_state = torch.randn(6, 3, 6, 4) if with_state else None
    assert_equals_reference(tensors, initial_state, cu_seqlens)


def test_empty_time_returns_the_initial_state():
    tensors = operands(length=0)
    initial_state = torch.randn(2, 3, 6, 4)
    y, final_state = fused.transport_scan(*tensors, initial_state=initial_state, output_final_state=True)
    assert y.shape == (2, 0, 3, 4)
    assert torch.equal(final_state, initial_state)
    assert fused.transport_scan(*tensors)[1] is None


def test_operands_need_not_be_contiguous():
    tensors = operands()
    strided = [tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in tensors]
    assert not strided[0].is_contiguous()
    for ours, plain in zip(results_and_gradients(fused, strided).values(), results_and_gradients(fused, tensors).values()):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(("dtype", "largest", "tolerance"), [(torch.float32, 87.0, 4e-7), (torch.float64, 700.0, 1e-12)])
def test_decay_is_the_exponential(dtype, largest, tolerance):
    rate = torch.linspace(-largest, largest, 2 * 6 * 400, dtype=dtype).view(1, 1, 800, 6)
    one = torch.ones(1, 1, 800, dtype=dtype)
    nothing = torch.zeros(1, 1, 800, 6, dtype=dtype)
    initial_state = torch.ones(1, 800, 6, 4, dtype=dtype)

    def scan(rate):
        identity = torch.eye(4, dtype=dtype).expand(1, 1, 800, 4, 4)
        given = (nothing[..., :4], nothing, nothing, one, rate.view(800, 6), identity)
        return fused.transport_scan(*given, initial_state=initial_state, output_final_state=True)[1][..., 0]

    # The exponent is rounded once before the exponential: relative errors grow with its size.
    error = (scan(rate).double() / torch.exp(rate.double()).view(1, 800, 6) - 1).abs() / (1 + rate.abs().view(1, 800, 6))
    assert error.max() < tolerance
    beyond = torch.tensor([-1e30, -160.0, 160.0, 1e30, float("nan"), 0.0], dtype=dtype).expand(1, 1, 800, 6)
    if dtype == torch.float32:
        assert torch.equal(scan(beyond)[0, 0, [0, 1, 2, 3, 5]], torch.tensor([0.0, 0.0, torch.inf, torch.inf, 1.0]))
    assert scan(beyond)[0, 0, 4].isnan()


def test_a_wiped_memory_leaves_exact_zeros():
    tensors = operands(length=40)
    tensors[3], tensors[4] = torch.ones_like(tensors[3]), torch.full_like(tensors[4], -160.0)
    results = results_and_gradients(fused, tensors, torch.randn(2, 3, 6, 4))
    last = tensors[1][:, -1].unsqueeze(-1) * tensors[0][:, -1].unsqueeze(-2)
    assert torch.equal(results["final_state"], last)
    for name in ("dstep", "ddrift", "dright", "dinitial_state"):
        assert torch.equal(results[name], torch.zeros_like(results[name])), name
    assert all(tensor.isfinite().all() for tensor in results.values())


def test_gradcheck():
    tensors = operands(batch=1, length=5, groups=2, dtype=torch.float64)
    shown = torch.randn_like(tensors[0])
    leaves = [tensor.requires_grad_() for tensor in (*tensors, torch.randn(1, 2, 6, 4, dtype=torch.float64), shown)]

    def scan(*given):
        return fused.transport_scan(*given[:6], initial_state=given[6], shown=given[7], output_final_state=True)

    assert torch.autograd.gradcheck(scan, leaves, fast_mode=True)


def test_a_cotangent_on_one_output_alone():
    tensors = operands()
    for pick in (0, 1):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        ours = torch.autograd.grad(fused.transport_scan(*leaves, output_final_state=True)[pick].sum(), leaves[0])[0]
        want = torch.autograd.grad(reference.transport_scan(*exact, output_final_state=True)[pick].sum(), exact[0])[0]
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=1e-4)


def test_gradients_without_kept_states_are_the_same():
    value, write, *rest = operands()
    tensors = (value.unsqueeze(-2), write.unsqueeze(-2), *rest, None, None, None)
    y, _, kept = fused._scan(*tensors, True)
    again, _, none = fused._scan(*tensors, False)
    assert torch.equal(y, again)
    assert none.numel() == 0
    dy = torch.randn_like(y)
    for ours, recomputed in zip(
        fused._scan_backward(*tensors, kept, dy, None)[:6], fused._scan_backward(*tensors, none, dy, None)[:6]
    ):
        assert torch.equal(ours, recomputed)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    value, write, *rest = operands(batch=1 if packed else 2, length=5, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 2, 5]) if packed else None
    initial_state = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    tensors = (value.unsqueeze(-2), write.unsqueeze(-2), *rest, initial_state, torch.randn_like(value.unsqueeze(-2)))
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.library.opcheck(fused._scan, (*leaves, cu_seqlens, True))
    y, final_state, kept = fused._scan(*tensors, cu_seqlens, True)
    torch.library.opcheck(
        fused._scan_backward, (*tensors, cu_seqlens, kept, torch.randn_like(y), torch.randn_like(final_state))
    )


def test_compiles_as_one_graph():
    tensors = operands()
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    scan = torch.compile(lambda *given: fused.transport_scan(*given)[0] * 2, fullgraph=True, backend="aot_eager")
    y = scan(*leaves)
    plain = fused.transport_scan(*(tensor.detach() for tensor in leaves))[0]
    assert torch.equal(y, 2 * plain)
    compiled = torch.autograd.grad(y.square().sum(), leaves)
    eager = torch.autograd.grad((2 * fused.transport_scan(*leaves)[0]).square().sum(), leaves)
    for ours, want in zip(compiled, eager):
        assert torch.equal(ours, want)


def test_vmap_is_a_loop():
    many = [operands(seed=seed) for seed in range(3)]
    stacked = [torch.stack(tensors).requires_grad_() for tensors in zip(*many)]
    ys = torch.func.vmap(lambda *given: fused.transport_scan(*given)[0])(*stacked)
    dvalues = torch.autograd.grad(ys.square().sum(), stacked[0])[0]
    for tensors, y, dvalue in zip(many, ys, dvalues):
        tensors[0].requires_grad_()
        alone = fused.transport_scan(*tensors)[0]
        assert torch.equal(y, alone)
        assert torch.equal(dvalue, torch.autograd.grad(alone.square().sum(), tensors[0])[0])


def test_second_derivatives_are_refused():
    leaves = [tensor.requires_grad_() for tensor in operands()]
    (gradient,) = torch.autograd.grad(fused.transport_scan(*leaves)[0].square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r'second derivative.*backend="associative"'):
        gradient.sum().backward()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"`value` is torch.bfloat16.*float32 or float64"):
        fused.transport_scan(*operands(dtype=torch.bfloat16))


@pytest.mark.parametrize("batch", [1, 5])
def test_results_do_not_depend_on_the_number_of_threads(batch):
    tensors = operands(batch=batch, length=50, groups=9)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(results_and_gradients(fused, tensors))
    for other in results[1:]:
        for name, tensor in other.items():
            assert torch.equal(tensor, results[0][name]), name


def test_concurrent_calls_from_python_threads():
    torch.set_num_threads(2)
    many = [operands(length=200, seed=seed) for seed in range(6)]
    alone = [results_and_gradients(fused, tensors) for tensors in many]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda tensors: results_and_gradients(fused, tensors), many * 3))
    for i, results in enumerate(together):
        assert all(torch.equal(tensor, alone[i % 6][name]) for name, tensor in results.items())


def _scan_in_child(connection, tensors):
    torch.set_num_threads(2)
    connection.send({name: tensor.numpy() for name, tensor in results_and_gradients(fused, tensors).items()})


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_workers():
    torch.set_num_threads(2)
    tensors = operands(length=200)
    here = results_and_gradients(fused, tensors)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_scan_in_child, args=(sender, tensors))
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
    chunk = fused.chunk_length(order, width, rank, right)
    operands_and_gradients = 2 * ((rank + 1) * (order + width) + 1 + right * width * width)
    assert order * width / chunk < 0.1 * operands_and_gradients


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs the peak memory counter of Linux")
def test_memory_of_the_backward_pass(monkeypatch):
    monkeypatch.undo()

    def memory(name):
        return int(pathlib.Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10

    tensors = operands(batch=4, length=256, groups=64, order=32)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    for _ in range(2):
        gc.collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        y, _ = fused.transport_scan(*leaves)
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        extra = memory("VmHWM") - before - size - 2 * y.nbytes
        del y, gradients
    assert extra < 0.25 * 2 * size, extra / (2 * size)


def build_scale(factor):
    def scale(x, start, stop):
        for i in range(start, stop):
            x[i] *= factor

    return scale


SCALE = "void(float64[::1], int64, int64)"


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels that were really compiled, with an empty memory of earlier ones."""
    names: list[str] = []
    monkeypatch.setattr(_numba, "_announce", names.append)
    monkeypatch.setattr(_numba, "_kernels", {})
    return names


def test_compiled_code_is_kept_on_disk(monkeypatch, tmp_path, compilations):
    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert _numba.cache_directory() == tmp_path / "new" / "cache"
    for attempt in range(3):
        _numba._kernels.clear()
        x = np.ones(3)
        _numba.jit(build_scale, SCALE, factor=3.0)(x, 1, 3)
        assert x.tolist() == [1.0, 3.0, 3.0]
        (file,) = _numba.cache_directory().iterdir()
        assert len(compilations) == (1 if attempt < 2 else 2)
        if attempt == 1:
            file.write_bytes(b"damaged")
    _numba.jit(build_scale, SCALE, factor=2.0)
    assert len(list(_numba.cache_directory().iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_a_compilation_only(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path / "file" / "below"))
    x = np.ones(2)
    kernel = _numba.jit(build_scale, SCALE, factor=5.0)
    kernel(x, 0, 2)
    assert x.tolist() == [5.0, 5.0]
    assert _numba.jit(build_scale, SCALE, factor=5.0) is kernel
    assert len(compilations) == 1


def test_first_compilation_is_said_once(monkeypatch, tmp_path, capsys, caplog):
    monkeypatch.setattr(_numba, "_announced", False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with caplog.at_level("INFO", logger="shippo_ssm"):
        _numba._announce("a")
        _numba._announce("b")
    assert capsys.readouterr().err.count("compiling kernels for this machine") == 1
    assert [record.getMessage() for record in caplog.records] == [f"compiling {name} for this machine" for name in "ab"]


def test_compiler_settings_do_not_leak(monkeypatch, tmp_path, compilations):
    from numba.core import config

    def settings():
        return {name: value for name, value in vars(config).items() if name.isupper()}

    monkeypatch.setenv("SHIPPO_CACHE_DIR", str(tmp_path))
    before = settings()
    _numba.jit(build_scale, SCALE, factor=7.0)
    assert compilations
    assert settings() == before
    with _numba._compiler_settings():
        assert settings() == before | {"SLP_VECTORIZE": 1}
    assert settings() == before


def test_parallel_for_covers_everything_and_raises():
    torch.set_num_threads(2)
    seen = np.zeros(1001, dtype=int)

    def count(start, stop):
        seen[start:stop] += 1

    for n in (0, 1, 1001):
        seen[:] = 0
        _numba.parallel_for(n, count)
        assert seen.tolist() == [1] * n + [0] * (1001 - n)
    with pytest.raises(ZeroDivisionError):
        _numba.parallel_for(8, lambda start, stop: 1 // 0)
    # Calls from inside a slice must not wait for threads that are all busy waiting.
    _numba.parallel_for(8, lambda start, stop: _numba.parallel_for(8, lambda start, stop: None))


def test_importing_takes_no_numba():
    code = "import sys, shippo_ssm.scan, shippo_ssm.scan.fused; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
