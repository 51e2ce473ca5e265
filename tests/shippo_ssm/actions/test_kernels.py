"""The compiled kernels: equal to the torch path in value and gradient, deterministic, honest about what they cannot do."""

from __future__ import annotations

import pytest
import torch

from shippo_ssm.actions import DenseExp, Dissipative, Orthogonal, SplitFlow, Structured, expm
from shippo_ssm.dispatch import choose_action

# One width of each kind per dtype: whole vectors (P^2 a multiple of eight) and single numbers.
CASES = [(torch.float32, 4), (torch.float64, 3)]


def mixed_generators(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Skew and general matrices with norms from 1e-8 to 1e3 in one batch whose size is no multiple of eight."""
    raw = torch.randn(203, width, width, dtype=torch.float64)
    raw[::2] -= raw[::2].mT.clone()
    raw[1::2] -= 2.0 * width * torch.eye(width, dtype=torch.float64)
    norms = torch.logspace(-8, 3, 203, dtype=torch.float64)
    norms[1::2].clamp_(max=50.0)
    return (raw / raw.abs().sum(-2).amax(-1)[:, None, None] * norms[:, None, None]).to(dtype)


@pytest.mark.parametrize(("dtype", "width"), CASES)
def test_expm_is_accurate_across_norms(dtype, width, exact_expm):
    generators = mixed_generators(width, dtype)
    results = expm(generators, backend="fused")
    eps = torch.finfo(dtype).eps
    for index in range(0, 203, 9):
        condition = max(1.0, generators[index].abs().sum(0).max().item()) if dtype == torch.float64 else 1.0
        assert exact_expm(generators[index], results[index]) <= 4 * eps * condition, f"matrix {index}"


@pytest.mark.parametrize(("dtype", "width"), CASES)
def test_expm_gradient_agrees_with_torch(dtype, width):
    generators = mixed_generators(width, dtype)[:170].requires_grad_()
    cotangent = torch.randn_like(generators)
    ours = torch.autograd.grad(expm(generators, backend="fused"), generators, cotangent)[0].double()
    wide = generators.detach().double().requires_grad_()
    want = torch.autograd.grad(expm(wide, backend="torch"), wide, cotangent.double())[0]
    error = (ours - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))
    condition = wide.detach().abs().sum(-2).amax(-1).clamp_min(1.0)
    assert (error / condition).max() <= 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("width", [1, 2, 6, 16])
def test_expm_at_other_widths(width):
    """Narrow ones are padded to width 4 in thought, wide ones loop over tiles; norms from tiny to beyond the kernel's."""
    generators = torch.randn(61, width, width) * torch.logspace(-6, 0.3, 61)[:, None, None] / width**0.5
    generators[50] = -1e9 * torch.eye(width)
    generators.requires_grad_()
    cotangent = torch.randn_like(generators)
    value = expm(generators, backend="fused")
    ours = [value, torch.autograd.grad(value, generators, cotangent)[0]]
    wide = generators.detach().double().requires_grad_()
    value = expm(wide, backend="torch")
    want = [value, torch.autograd.grad(value, wide, cotangent.double())[0]]
    for x, y in zip(ours, want):
        assert ((x - y).flatten(1).norm(dim=1) <= 32 * torch.finfo(torch.float32).eps * y.flatten(1).norm(dim=1)).all()


def test_expm_derivatives_of_first_and_second_order():
    generators = torch.randn(3, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: expm(a, backend="fused"), (generators,))
    assert torch.autograd.gradgradcheck(lambda a: expm(a, backend="fused"), (generators,))


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        (torch.float32, SplitFlow(4)),
        (torch.float32, SplitFlow(4, rank=1)),
        (torch.float64, SplitFlow(3)),
        (torch.float64, SplitFlow(3, diagonal=False)),
        (torch.float32, Orthogonal(4)),
        (torch.float64, Orthogonal(3)),
        (torch.float32, Orthogonal(2)),
        (torch.float32, Dissipative(4)),
        (torch.float64, Structured(3, bounded=True)),
        (torch.float64, Orthogonal(5)),
    ],
    ids=lambda case: f"{type(case).__name__} {case.width}" if hasattr(case, "width") else str(case),
)
def test_kernels_agree_with_torch(dtype, family):
    width = family.width
    coords = (2.0 * torch.randn(5, 21, family.num_coordinates, dtype=dtype)).requires_grad_()
    step = torch.rand(21, dtype=dtype).requires_grad_()
    cotangent = torch.randn(5, 21, width, width, dtype=dtype)
    results = {}
    for backend, kind in (("fused", dtype), ("torch", torch.float64)):
        wide = [tensor.to(kind) for tensor in (coords, step)]
        right = family.to(kind).dense(*wide, backend=backend)
        results[backend] = [right, *torch.autograd.grad(right, (coords, step), cotangent.to(kind))]
    eps = torch.finfo(dtype).eps
    for ours, want in zip(results["fused"], results["torch"]):
        assert ours.shape == want.shape
        assert (ours.double() - want.double()).norm() <= 16 * eps * want.double().norm()


def test_rotations_at_small_and_large_angles():
    scales = torch.logspace(-12, 7, 203, dtype=torch.float64)[:, None]
    coords = (scales * torch.randn(203, 3, dtype=torch.float64)).requires_grad_()
    cotangent = torch.randn(203, 3, 3, dtype=torch.float64)
    results = []
    for backend in ("fused", "torch"):
        right = Orthogonal(3).dense(coords, 1.0, backend=backend)
        results.append((right, *torch.autograd.grad(right, coords, cotangent)))
    for ours, want in zip(*results):
        torch.testing.assert_close(ours, want, rtol=1e-7, atol=1e-8)
    right = results[0][0]
    assert (right @ right.mT - torch.eye(3, dtype=torch.float64)).abs().max() <= 4e-15


def test_split_product_at_large_angles_and_decays():
    flow = SplitFlow(3)
    coords = torch.randn(40, 9, dtype=torch.float64)
    coords[:20, 3:6] *= 1e7
    coords[20:, :3] = 1e5
    torch.testing.assert_close(
        flow.dense(coords, 1.0, backend="fused"), flow.dense(coords, 1.0, backend="torch"), rtol=1e-9, atol=1e-9
    )
    entries = SplitFlow(3, rotations=False, shears=False).dense(
        torch.full((8, 3), 1e5, dtype=torch.float64), 1.0, backend="fused"
    )
    assert (entries.diagonal(dim1=-2, dim2=-1) > 0).all()


@pytest.mark.parametrize(
    "flow",
    [SplitFlow(3), SplitFlow(3, bounded=True), Orthogonal(3), Structured(3, bounded=True)],
    ids=["split", "bounded", "orthogonal", "structured"],
)
def test_second_derivatives(flow):
    coords = torch.randn(2, flow.num_coordinates, dtype=torch.float64, requires_grad=True)
    step = torch.rand(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, s: flow.dense(c, s, backend="fused"), (coords, step))
    assert torch.autograd.gradgradcheck(lambda c, s: flow.dense(c, s, backend="fused"), (coords, step))


def test_zero_step_is_the_identity():
    assert torch.equal(SplitFlow(4).dense(torch.randn(40, 16), 0.0, backend="fused"), torch.eye(4).expand(40, 4, 4))
    assert torch.equal(expm(torch.zeros(9, 4, 4), backend="fused"), torch.eye(4).expand(9, 4, 4))


def test_results_do_not_depend_on_threads_or_position():
    generators = mixed_generators(4, torch.float32)
    coords, step = torch.randn(203, 16), torch.rand(203)
    alone = expm(generators, backend="fused"), SplitFlow(4).dense(coords, step, backend="fused")
    torch.set_num_threads(2)
    together = expm(generators, backend="fused"), SplitFlow(4).dense(coords, step, backend="fused")
    assert all(torch.equal(a, b) for a, b in zip(alone, together))
    assert torch.equal(expm(generators[8:16], backend="fused"), alone[0][8:16])


def test_ops_keep_their_contracts():
    generators = torch.randn(9, 4, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.shippo.expm.default, (generators, "fused"))
    torch.library.opcheck(
        torch.ops.shippo.expm_frechet.default, (torch.randn(9, 4, 4).mT.requires_grad_(), generators, "fused")
    )
    coords, step = torch.randn(9, 16, requires_grad=True), torch.rand(9, requires_grad=True)
    torch.library.opcheck(torch.ops.shippo.right_action.default, (coords, step, 4, "split", [4, 6, 6, 0, 1]))
    turns = torch.randn(9, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.shippo.right_action.default, (turns, step, 4, "rotation", [0] * 5))
    coords = torch.randn(9, 10, requires_grad=True)
    torch.library.opcheck(torch.ops.shippo.right_action.default, (coords, step, 4, "exponential", [4, 6, 0, 1, 0]))


def test_compiles_without_a_graph_break():
    flow, dense = SplitFlow(4), DenseExp(4)
    coords, step = torch.randn(40, 16, requires_grad=True), torch.rand(40)

    def both(coords, step):
        return flow.dense(coords, step, backend="fused") @ dense.dense(coords, step, backend="fused")

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(coords, step), both(coords, step))
    gradients = [torch.autograd.grad(f(coords, step).square().sum(), coords)[0] for f in (compiled, both)]
    torch.testing.assert_close(*gradients)


def test_auto_says_what_it_takes():
    assert choose_action("expm", (torch.zeros(64, 4, 4),), 4, 2) == "fused"
    assert choose_action("expm", (torch.zeros(2, 4, 4),), 4, 2) == "torch"
    assert choose_action("expm", (torch.zeros(64, 17, 17),), 17, 2) == "torch"
    assert choose_action("expm", (torch.zeros(64, 4, 4, dtype=torch.bfloat16),), 4, 2) == "torch"
    assert choose_action("SplitFlow", (torch.zeros(64, 16),), 4, 1) == "fused"
    assert choose_action("expm", (torch.zeros(2, 4, 4),), 4, 2, "fused") == "fused"


def test_gradient_transforms_take_the_torch_formulas():
    coords, step = torch.randn(40, 16), torch.rand(40)
    flow = SplitFlow(4)
    slopes = torch.func.grad(lambda c: flow.dense(c, step).square().sum())(coords)
    tracked = coords.clone().requires_grad_()
    want = torch.autograd.grad(flow.dense(tracked, step).square().sum(), tracked)[0]
    torch.testing.assert_close(slopes, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expm(torch.zeros(2, 17, 17), backend="fused"), "width 17"),
        (lambda: expm(torch.zeros(2, 2, 2, dtype=torch.bfloat16), backend="fused"), "bfloat16"),
        (lambda: SplitFlow(9).dense(torch.zeros(81), 1.0, backend="fused"), "width 9"),
        (lambda: torch.func.grad(lambda x: expm(x, backend="fused").sum())(torch.zeros(4, 4)), "a transform of torch.func"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
