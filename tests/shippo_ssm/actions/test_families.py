"""Families: one battery for all, the order of the split product, its distance to the dense exponential, errors.

The battery is every test here that takes a `family` and nothing else; `tests/test_extending.py` runs it on a toy.
"""

from __future__ import annotations

import math

import pytest
import torch

from shippo_ssm.actions import (
    DenseExp,
    Dissipative,
    Identity,
    Lie,
    Oracle,
    Orthogonal,
    SplitFlow,
    Structured,
    expm,
    get_family,
)

FAMILIES = {
    "split": lambda: SplitFlow(4),
    "split, rank 2": lambda: SplitFlow(3, rank=2).double(),
    "split, rotations": lambda: SplitFlow(3, diagonal=False, shears=False),
    "split, bounded": lambda: SplitFlow(3, bounded=True),
    "structured": lambda: Structured(3, rank=1).double(),
    "structured, bounded": lambda: Structured(4, rank=1, bounded=True).double(),
    "dense": lambda: DenseExp(3),
    "dense, bounded": lambda: DenseExp(3, bounded=True),
    "orthogonal, width 2": lambda: Orthogonal(2),
    "orthogonal, width 3": lambda: Orthogonal(3),
    "orthogonal, width 4": lambda: Orthogonal(4),
    "orthogonal, width 5": lambda: Orthogonal(5),
    "reflections": lambda: Orthogonal(4, reflections=True),
    "dissipative": lambda: Dissipative(4),
    "lie": lambda: Lie(torch.randn(2, 4, 4, dtype=torch.float64)),
    "identity": lambda: Identity(4),
    "oracle": lambda: Oracle(3),
}
STABLE = {name for name in FAMILIES if name.startswith(("orthogonal", "dissipative", "identity")) or name.endswith("bounded")}
STABLE |= {"split, rotations", "reflections"}


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request):
    return request.param()


def operands(family, *shape):
    coords = torch.randn(*shape, family.num_coordinates, dtype=torch.float64)
    return coords, torch.rand(shape, dtype=torch.float64)


def test_shapes_names_and_call(family):
    assert family.num_coordinates == len(family.coordinates) == len(set(family.coordinates))
    coords, step = operands(family, 2, 5)
    dense = family.dense(coords, step)
    assert dense.shape == (2, 5, family.width, family.width)
    assert dense.dtype == torch.float64
    assert torch.equal(family(coords, step), dense)


def test_act_inverse_and_growth_bound_agree_with_dense(family):
    coords, step = operands(family, 2, 5)
    dense = family.dense(coords, step)
    state = torch.randn(2, 5, 7, family.width, dtype=torch.float64)
    torch.testing.assert_close(family.act(state, coords, step), state @ dense, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(family.growth_bound(coords, step), torch.linalg.svdvals(dense)[..., 0])
    eye = torch.eye(family.width, dtype=torch.float64).expand_as(dense)
    torch.testing.assert_close(dense @ family.inverse(coords, step), eye, rtol=1e-8, atol=1e-9)


def test_starts_at_the_identity(family):
    dense = family.dense(family.init_coordinates().double(), torch.tensor(0.1, dtype=torch.float64))
    eye = torch.eye(family.width, dtype=torch.float64)
    assert (dense - eye).abs().max() < 1e-3
    # In unit time the memory lasts.
    unit = family.dense(family.init_coordinates(4096.0).double(), torch.tensor(1.0, dtype=torch.float64))
    assert (unit - eye).abs().max() < 1.01 / 4096


def test_gradients(family):
    coords, step = operands(family, 2)
    if family.num_coordinates:
        assert torch.autograd.gradcheck(family.dense, (coords.requires_grad_(), step.requires_grad_()))


def test_generator_is_the_derivative_at_step_zero(family):
    coords, _ = operands(family, 3)
    if isinstance(family, Oracle):
        with pytest.raises(ValueError, match="no generator"):
            family.generator(coords)
        return
    small = 1e-6
    slope = (family.dense(coords, small) - family.dense(coords, 0.0)) / small
    torch.testing.assert_close(slope, family.generator(coords), rtol=1e-4, atol=1e-4)


def test_step_broadcasts_and_half_types_are_kept(family):
    coords, _ = operands(family, 2, 5)
    torch.testing.assert_close(family.dense(coords, 0.5), family.dense(coords, torch.full((2, 5), 0.5).double()))
    half = family.dense(coords.bfloat16(), torch.full((2, 5), 0.5, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), family.dense(coords.bfloat16().double(), 0.5), rtol=0.05, atol=0.05)


def product(right):
    """The product of all matrices [T, P, P], pairwise."""
    while len(right) > 1:
        if len(right) % 2:
            right = torch.cat([right, torch.eye(right.shape[-1], dtype=right.dtype)[None]])
        right = right[0::2] @ right[1::2]
    return right[0]


def test_no_stable_action_lengthens_a_row(family):
    for scale in (0.3, 3.0, 100.0) if family.stable else ():
        coords, step = operands(family, 50)
        assert (torch.linalg.matrix_norm(family.dense(scale * coords, step), 2) <= 1 + 1e-9).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_families_say_whether_they_are_stable(name):
    assert FAMILIES[name]().stable == (name in STABLE)


@pytest.mark.parametrize("name", sorted(STABLE))
def test_a_long_product_of_stable_actions_does_not_grow(name):
    family = FAMILIES[name]().float()
    coords = 100.0 * torch.randn(100_000, family.num_coordinates)
    coords[:50_000] *= 1e-3
    whole = product(family.dense(coords, torch.rand(100_000)).double())
    assert torch.linalg.matrix_norm(whole, 2) <= 1 + 1e-3
    if name.startswith("orthogonal"):
        assert (whole @ whole.mT - torch.eye(family.width, dtype=torch.float64)).abs().max() <= 5e-4


@pytest.mark.parametrize("kind", [SplitFlow, Structured, DenseExp])
def test_bounding_leaves_what_cannot_grow_as_it_is(kind):
    free, bounded = kind(4), kind(4, bounded=True)
    coords = torch.zeros(60, 16)
    if kind is DenseExp:
        raw = torch.randn(60, 4, 4)
        coords = (raw - raw.mT).flatten(1)
    else:
        coords[:, :10] = torch.randn(60, 10)
    assert torch.equal(free.dense(coords, 0.7), bounded.dense(coords, 0.7))
    other = torch.randn(60, 16) * 3.0
    assert torch.linalg.matrix_norm(free.dense(other, 0.7), 2).max() > 1.5


def test_structured_is_the_exponential_of_what_the_split_flow_splits():
    split, whole = SplitFlow(4), Structured(4)
    assert split.coordinates == whole.coordinates
    assert torch.equal(split.init_coordinates(), whole.init_coordinates())
    coords, step = operands(split, 40)
    torch.testing.assert_close(whole.dense(coords, step), expm(step[:, None, None] * split.generator(coords)))


@pytest.mark.parametrize("kind", [Orthogonal, Dissipative])
@pytest.mark.parametrize("count", [3, 40])
def test_stable_families_start_at_the_identity_exactly_and_with_a_slope(kind, count):
    family = kind(4)
    coords = family.init_coordinates().repeat(count, 1).requires_grad_()
    right = family.dense(coords, 1.0)
    assert torch.equal(right, torch.eye(4).expand(count, 4, 4))
    (slope,) = torch.autograd.grad((right * torch.randn(4, 4)).sum(), coords)
    assert (slope != 0).all()


@pytest.mark.parametrize("width", [2, 5])
def test_a_reflection_is_orthogonal_with_determinant_minus_one_and_exact_to_second_order(width):
    family, vector = Orthogonal(width, reflections=True), torch.nn.functional.normalize(torch.randn(width).double(), dim=0)
    angles = torch.randn(family.num_coordinates - width).double()

    def right(length):
        return family.dense(torch.cat([angles, length * vector]), 0.5)

    reflection, eye = right(2 * math.pi), torch.eye(width).double()
    torch.testing.assert_close(reflection @ reflection.mT, eye)
    torch.testing.assert_close(torch.linalg.det(reflection), torch.tensor(-1.0).double())
    torch.testing.assert_close(right(0.0), Orthogonal(width).dense(angles, 0.5))
    # Half the error of a coordinate leaves a quarter of the error of R.
    errors = [float((right(2 * math.pi - error) - reflection).norm()) for error in (1e-2, 5e-3)]
    assert 3.9 < errors[0] / errors[1] < 4.1
    # The series and the closed form meet.
    torch.testing.assert_close(right(0.2 - 1e-9), right(0.2 + 1e-9), rtol=1e-8, atol=1e-8)


def test_a_bound_has_the_same_slope_at_its_edge_in_torch_and_by_the_kernel():
    family, weights = DenseExp(3, bounded=True), torch.randn(3, 3)
    slopes = []
    for backend in ("torch", "fused"):
        coords = torch.zeros(40, 9, requires_grad=True)
        (slope,) = torch.autograd.grad((family.dense(coords, 1.0, backend=backend) * weights).sum(), coords)
        slopes.append(slope)
    torch.testing.assert_close(*slopes)
    assert not torch.allclose(slopes[0], weights.flatten().expand(40, 9))


def test_split_flow_has_sixteen_named_coordinates_at_width_four():
    flow = SplitFlow(4)
    assert flow.num_coordinates == 16
    pairs = ["0,1", "0,2", "0,3", "1,2", "1,3", "2,3"]
    names = [f"d[{i}]" for i in range(4)] + [f"theta[{p}]" for p in pairs] + [f"eta[{p}]" for p in pairs]
    assert list(flow.coordinates) == names


def test_split_flow_is_the_documented_product_in_the_documented_order():
    flow = SplitFlow(3, rank=1).double()
    coords, step = operands(flow, 4)
    product = torch.eye(3, dtype=torch.float64)
    for name, factor, coord in zip(flow.coordinates, flow.factors, coords.unbind(-1)):
        coef = -torch.nn.functional.softplus(coord) if name.startswith("d") else coord
        product = product @ torch.linalg.matrix_exp((step * coef)[:, None, None] * factor.generator.double())
    torch.testing.assert_close(flow.dense(coords, step), product, rtol=1e-12, atol=1e-13)
    reversed_product = SplitFlow(3, rank=1).double()
    assert not torch.allclose(flow.dense(coords, step), reversed_product.inverse(coords, step))


def test_split_product_differs_from_the_dense_exponential_by_the_square_of_the_step():
    flow = SplitFlow(4, rank=1).double()
    coords = torch.randn(64, flow.num_coordinates, dtype=torch.float64)
    steps = [2.0**-k for k in range(6, 13)]
    errors = [(flow.dense(coords, step) - expm(step * flow.generator(coords))).norm().item() for step in steps]
    logs = torch.tensor([[math.log(step), math.log(error)] for step, error in zip(steps, errors)])
    centred = logs - logs.mean(0)
    slope = (centred[:, 0] @ centred[:, 1] / centred[:, 0].square().sum()).item()
    assert abs(slope - 2.0) <= 0.1


def test_diagonal_only_shrinks_and_never_vanishes():
    flow = SplitFlow(2, rotations=False, shears=False)
    dense = flow.dense(torch.tensor([[-50.0, 0.0], [3.0, 1e4]]), torch.tensor([1.0, 1e3]))
    entries = dense.diagonal(dim1=-2, dim2=-1)
    assert (entries > 0).all()
    assert (entries <= 1).all()
    assert torch.isfinite(flow.inverse(torch.tensor([1e4, 1e4]), 1e3)).all()
    assert torch.equal(SplitFlow(3).dense(torch.randn(9), 0.0), torch.eye(3))


def test_learnable_parts_are_parameters():
    assert not list(SplitFlow(4).parameters())
    assert {name for name, _ in SplitFlow(4, rank=2).named_parameters()} == {"p", "q"}
    generators = torch.randn(3, 2, 2)
    assert [p.shape for p in Lie(generators).parameters()] == [generators.shape]
    fixed = Lie(generators, learnable=False)
    assert not list(fixed.parameters())
    assert torch.equal(fixed.state_dict()["generators"], generators)
    lie = Lie(generators)
    lie.dense(torch.randn(5, 3), torch.rand(5)).sum().backward()
    assert lie.generators.grad is not None
    assert lie.generators.grad.abs().sum() > 0


def test_oracle_takes_matrices_and_flat_entries():
    given = torch.randn(2, 5, 3, 3)
    assert torch.equal(Oracle(3).dense(given, torch.ones(2, 5)), given)
    assert torch.equal(Oracle(3).dense(given.flatten(-2), torch.ones(2, 5)), given)


def test_get_family():
    words = {"orthogonal": Orthogonal, "dissipative": Dissipative, "structured": Structured}
    for word, kind in {**words, "split": SplitFlow, "dense": DenseExp, "none": Identity}.items():
        found = get_family(word, 4)
        assert type(found) is kind
        assert found.width == 4
    own = SplitFlow(4, shears=False)
    assert get_family(own, 4) is own
    with pytest.raises(ValueError, match="'split', 'structured', 'dense', 'none'"):
        get_family("splt", 4)
    with pytest.raises(ValueError, match="has width 4; expected 8"):
        get_family(own, 8)


def test_compiles_and_vmaps(family):
    coords, step = operands(family, 2, 3)
    want = family.dense(coords, step)
    # Most families share one method, of which torch compiles eight versions in a process.
    torch.compiler.reset()
    compiled = torch.compile(family.dense, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(coords, step), want)
    torch.testing.assert_close(torch.func.vmap(family.dense)(coords, step), want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [4, 40])
def test_what_is_not_finite_is_nan_where_it_stands(family, bad, count):
    """In both kernels: the token's own R and gradient, and no other's."""
    if not family.num_coordinates:
        pytest.skip("R = I, whatever comes")
    step = torch.rand(count)
    step[1] = bad if not isinstance(family, Oracle) else 1.0
    coords = 0.1 * torch.randn(count, family.num_coordinates)
    coords[2] = bad
    coords.requires_grad_()
    right = family.dense(coords, step)
    slope = torch.autograd.grad(right[torch.arange(count) != 2].sum(), coords)[0]
    hit = torch.zeros(count, dtype=torch.bool)
    hit[2] = True
    hit[1] = not isinstance(family, Oracle)
    assert not right[hit].isfinite().all(-1).all(-1).any()
    assert right[~hit].isfinite().all()
    assert slope[~hit].isfinite().all()


def test_derivatives_by_torch_func_and_in_forward_mode(family):
    """jvp and grad agree with backward mode, through the coordinates and through the step alone."""
    if not family.num_coordinates:
        pytest.skip("R = I, whatever comes")
    family = family.double()
    coords = 0.3 * torch.randn(40, family.num_coordinates, dtype=torch.float64)
    step = torch.rand(40, dtype=torch.float64)
    weights = torch.randn(40, family.width, family.width, dtype=torch.float64)
    tracked = coords.clone().requires_grad_(), step.clone().requires_grad_()
    want = torch.autograd.grad((family.dense(*tracked) * weights).sum(), tracked, allow_unused=True, materialize_grads=True)

    def total(coords, step):
        return (family.dense(coords, step) * weights).sum()

    for place in (0, 1):
        got = torch.func.grad(total, argnums=place)(coords, step)
        torch.testing.assert_close(got, want[place], rtol=1e-9, atol=1e-10)
        tangents = [torch.zeros_like(coords), torch.zeros_like(step)]
        tangents[place] = torch.randn_like(tangents[place])
        slope = torch.func.jvp(total, (coords, step), tuple(tangents))[1]
        torch.testing.assert_close(slope, (tangents[place] * want[place]).sum(), rtol=1e-9, atol=1e-10)


def test_shapes_without_storage(family):
    with torch.device("meta"):
        bare = type(family)(torch.zeros(2, 4, 4)) if isinstance(family, Lie) else type(family)(family.width)
        dense = bare.dense(torch.zeros(2, 40, bare.num_coordinates), torch.ones(40))
    assert dense.shape == (2, 40, bare.width, bare.width)
    assert dense.device.type == "meta"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SplitFlow(4).dense(torch.zeros(2, 15), 1.0), "`coords` has shape"),
        (lambda: SplitFlow(4).dense(torch.zeros(2, 16), torch.ones(3)), "expected to broadcast"),
        (lambda: SplitFlow(4).act(torch.zeros(2, 3), torch.zeros(16), 1.0), "`state` has shape"),
        (lambda: SplitFlow(4).dense(torch.zeros(16, dtype=torch.int64), 1.0), "floating"),
        (lambda: SplitFlow(0), "`width` is 0"),
        (lambda: SplitFlow(2, rank=-1), "`rank` is -1"),
        (lambda: SplitFlow(2, rank=1, bounded=True), "Structured"),
        (lambda: Lie(torch.zeros(2, 3, 2)), "square"),
        (lambda: Lie(torch.zeros(2, 2)), r"\[K, P, P\]"),
        (lambda: Lie(torch.full((1, 2, 2), float("nan"))), "not finite"),
        (lambda: Oracle(2).dense(torch.zeros(5), 1.0), "`coords` has shape"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_signature_tells_families_apart_and_bounded_is_fixed():
    """A cached decode plan compares signatures: whatever changes the inline kernel changes the signature."""
    kinds = [SplitFlow(4), SplitFlow(4, bounded=True), SplitFlow(4, shears=False), Structured(4), DenseExp(4), DenseExp(3)]
    assert len({family.signature() for family in kinds}) == len(kinds)
    assert SplitFlow(4).signature() == SplitFlow(4).signature()
    with pytest.raises(AttributeError):
        kinds[0].bounded = True  # pyright: ignore[reportAttributeAccessIssue]
    before = kinds[0].signature()
    kinds[0].__class__ = Structured
    assert kinds[0].signature() != before


NONE = {"diagonal": False, "rotations": False, "shears": False}


@pytest.mark.parametrize("bare", [Orthogonal(1), Structured(3, **NONE), SplitFlow(3, **NONE)], ids=repr)
def test_without_coordinates_a_family_is_the_identity(bare):
    """Also for as many items as a kernel takes, which would read coordinates that are not there."""
    coords, step = torch.zeros(64, 0, requires_grad=True), torch.ones(64, requires_grad=True)
    assert bare.inline is None or bare.inline.kind == "split"
    right = bare(coords, step)
    assert torch.equal(right, torch.eye(bare.width).expand(64, -1, -1))
    right.sum().backward()
