"""Hostile inputs, many in one process: `python -m tests.hostile GROUP`. Each is refused with `ValueError` or answered.

A line is printed before each input, so that the last one names what ended the process. `tests/test_hostile.py` runs the groups.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shippo_ssm import Shippo
from shippo_ssm.layers import CellState, ShippoState, shippo_cell
from shippo_ssm.models import SequenceConfig, SequenceModel
from shippo_ssm.scan import transport_scan

Input = tuple[str, Callable[[], Any]]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was given back, as sharded training does with weights."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def odd_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values in other dtypes, sizes and places."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64):
        yield str(dtype), tensor.to(dtype)
    yield "one row less", tensor[:-1]
    yield "one row", tensor[:1]
    yield "rows of another batch", torch.cat([tensor, tensor])
    yield "no last axis", tensor[..., 0]
    yield "a shorter last axis", tensor[..., :-1]
    yield "a longer last axis", torch.cat([tensor, tensor], -1)
    yield "empty", tensor[..., :0]
    yield "stride 0", tensor[:1].expand_as(tensor)
    yield "transposed memory", tensor.transpose(0, -1).contiguous().transpose(0, -1)
    yield "a negative view", torch._neg_view(tensor)
    yield "no memory", tensor.to("meta")
    yield "sparse", tensor.to_sparse()
    yield "NaN", torch.full_like(tensor, torch.nan)


def states() -> Iterator[Input]:
    """One tensor of a decode state is another one; then 30 steps in place."""
    layer, u = Shippo(32, d_state=16, controller_conv=3).eval(), torch.randn(4, 32)
    with torch.no_grad():
        _, state = layer.step(u, layer.init_state(4))

    def steps(bad: Any) -> None:
        with torch.no_grad():
            for _ in range(30):
                _, bad = layer.step(u, bad, in_place=True)

    places: list[tuple[str, Any, Callable[[Any], Any]]] = [("conv", state.conv, lambda odd: state._replace(conv=odd))]
    for name in state.cell._fields:
        places.append(
            (name, getattr(state.cell, name), lambda odd, name=name: state._replace(cell=state.cell._replace(**{name: odd})))
        )
    for name, tensor, put in places:
        for what, odd in odd_tensors(tensor):
            yield f"{name}: {what}", lambda odd=odd, put=put: steps(put(odd))
        yield f"{name}: freed", lambda put=put, tensor=tensor: steps(put(freed(tensor)))
        yield f"{name}: None", lambda put=put: steps(put(None))
        yield f"{name}: a list", lambda put=put, tensor=tensor: steps(put(tensor.tolist()))
    assert state.controller is not None
    for what, odd in [*odd_tensors(state.controller), ("None", None), ("a list", state.controller.tolist())]:
        yield f"controller: {what}", lambda odd=odd: steps(state._replace(controller=odd))
    yield "cell: None", lambda: steps(state._replace(cell=None))
    yield "state: a tuple", lambda: steps(tuple(state))
    for what, odd in odd_tensors(u):
        yield f"u: {what}", lambda odd=odd: layer.step(odd, state, in_place=True)
    for what, odd in odd_tensors(torch.ones(4)):
        yield f"dt: {what}", lambda odd=odd: layer.step(u, state, dt=odd)


BOUNDS = (
    [0, 8, 1 << 22], [0, -(1 << 22), 16], [-(1 << 40), 8, 16], [0, 20, 16], [0, 8, 15], [1, 8, 16], [0, 8, 1 << 62],
    [-(1 << 63), 8, (1 << 63) - 1],
)  # fmt: skip


def packed_calls() -> dict[str, Callable[[Any, Any], Any]]:
    """Calls on (x [1, 16, 8], bounds)."""
    G, N, P = 2, 8, 4
    write, read, step = torch.randn(1, 16, G, N), torch.randn(1, 16, G, N), torch.rand(1, 16, G)
    drift, right, mix = -torch.rand(G, N), torch.randn(1, 16, G, P, P), torch.rand(1, 16, G)
    layer = Shippo(8, d_state=N, controller_conv=2)

    def scan(x: Any, bounds: Any) -> Any:
        y, state = transport_scan(
            x.unflatten(-1, (G, P)), write, read, step, drift, right, cu_seqlens=bounds, output_final_state=True
        )
        assert state is not None
        return y.sum() + state.sum()

    def cell(x: Any, bounds: Any) -> Any:
        y, state = shippo_cell(
            x.unflatten(-1, (G, P)), write, read, step, mix, drift, right, cu_seqlens=bounds, output_final_state=True
        )
        assert state is not None
        return y.sum() + state.memory.sum()

    return {"scan": scan, "cell": cell, "layer": lambda x, bounds: layer(x, cu_seqlens=bounds).sum()}


def call_packed(run: Callable[[Any, Any], Any], x: torch.Tensor, bounds: torch.Tensor) -> None:
    run(x, bounds)
    run(x.clone().requires_grad_(), bounds).sum().backward()


def bounds() -> Iterator[Input]:
    """Boundaries outside of the operands: eager, under `vmap`, and of dtypes and shapes that are none."""
    x = torch.randn(1, 16, 8)
    for name, run in packed_calls().items():
        for given in BOUNDS:
            for dtype in (torch.int64, torch.int32):
                if dtype == torch.int64 or max(map(abs, given)) < 1 << 31:
                    odd = torch.tensor(given, dtype=dtype)
                    yield f"{name}: {given} {dtype}", lambda run=run, odd=odd: call_packed(run, x, odd)

            def mapped(run: Any = run, given: Any = given) -> None:
                call_packed(lambda x, b: torch.func.vmap(run)(x[None], b[None]), x, torch.tensor(given))

            yield f"{name}: {given} under vmap", mapped
        for odd in (
            torch.tensor([]),
            torch.tensor([0]),
            torch.tensor([[0, 16]]),
            torch.tensor([0.0, 16.0]),
            torch.tensor([0, 1]),
        ):
            yield f"{name}: {odd}", lambda run=run, odd=odd: call_packed(run, x, odd)


def compiled() -> Iterator[Input]:
    """Boundaries that only a compiled program sees."""
    x, good = torch.randn(1, 16, 8), torch.tensor([0, 8, 16])
    for name, run in packed_calls().items():
        call = torch.compile(run, backend="aot_eager")
        call_packed(call, x, good)
        for given in BOUNDS:
            yield f"{name}: {given} compiled", lambda call=call, given=given: call_packed(call, x, torch.tensor(given))


def weights() -> Iterator[Input]:
    """A parameter is replaced behind a plan: other sizes, dtypes and memory."""
    u = torch.randn(2, 16)
    for name, parameter in Shippo(16, d_state=8).named_parameters():
        for what, odd in [*odd_tensors(parameter.detach()), ("freed", freed(parameter.detach()))]:

            def steps(name: str = name, odd: torch.Tensor = odd) -> None:
                layer = Shippo(16, d_state=8).eval()
                with torch.no_grad():
                    _, state = layer.step(u)
                    owner = layer.get_submodule(name.rpartition(".")[0])
                    owner._parameters[name.rpartition(".")[2]] = nn.Parameter(odd, requires_grad=False)
                    for _ in range(3):
                        _, state = layer.step(u, state)

            yield f"{name}: {what}", steps


def tokens() -> Iterator[Input]:
    """Tokens outside of the vocabulary, lengths that do not fit, and operands of the scan in other forms."""
    model = SequenceModel(SequenceConfig(vocab_size=11, d_model=16, n_layers=1))
    for given in ([[11]], [[-1]], [[1 << 40]], [[]], [[0.5]], [[True]]):
        yield f"tokens {given}", lambda given=given: model(torch.tensor(given))
    B, T, G, N, P = 2, 5, 2, 8, 4
    shapes = {"value": (B, T, G, P), "write": (B, T, G, N), "read": (B, T, G, N), "step": (B, T, G), "drift": (G, N)}
    operands: dict[str, Any] = {name: torch.randn(shape) for name, shape in (shapes | {"right": (B, T, G, P, P)}).items()}
    for name, tensor in operands.items():
        for what, odd in odd_tensors(tensor):
            for backend in ("auto", "segmented", "chunked"):
                given: Any = operands | {name: odd, "backend": backend}
                yield f"{name}: {what}, {backend}", lambda given=given: transport_scan(**given)


def exported() -> Iterator[Input]:
    """Operands of other dtypes, strides and places in exported programs: answered as those of the program's own, or refused."""
    layer, rows = Shippo(16, d_state=8, num_bc_groups=1).eval(), torch.randn(4, 16)
    with torch.no_grad():
        _, state = layer.step(rows)

    def step(u: Any, conv: Any, *cell: Any) -> Any:
        y, after = layer.step(u, ShippoState(conv, CellState(*cell)))
        return torch.cat([y, after.conv.flatten(1), *(tensor.flatten(1) for tensor in after.cell)], 1)

    def scan(*operands: Any) -> Any:
        return transport_scan(*operands)[0]

    sizes = ((4, 5, 2, 4), (4, 5, 2, 8), (4, 5, 2, 8), (4, 5, 2), (2, 8), (4, 5, 2, 4, 4))
    calls = {"step": (step, (rows, state.conv, *state.cell)), "scan": (scan, tuple(map(torch.rand, sizes)))}
    for name, (run, operands) in calls.items():
        module = nn.Module()
        module.forward = run
        with torch.no_grad():
            program = torch.export.export(module, operands).module()
        for number, operand in enumerate(operands):
            for what, odd in odd_tensors(operand):

                def call(
                    run: Any = run, program: Any = program, given: Any = operands, number: int = number, odd: Any = odd
                ) -> None:
                    with torch.no_grad():
                        answer = program(*given[:number], odd, *given[number + 1 :])
                        plain = odd.resolve_neg().to(given[number].dtype).contiguous()
                        expected = run(*given[:number], plain, *given[number + 1 :])
                    torch.testing.assert_close(answer, expected, equal_nan=True)

                yield f"{name}, operand {number}: {what}", call


GROUPS = {group.__name__: group for group in (states, bounds, compiled, weights, tokens, exported)}
# What may refuse an input beside our ValueError, by the beginning of its name: torch's products refuse dtypes and sizes, its
# indexing refuses positions in a program where the boundaries cannot be read beforehand.
TORCH = (RuntimeError, IndexError)
REFUSALS: dict[str, tuple[str, ...]] = {
    "states": ("u:",),
    "weights": ("",),
    "tokens": ("tokens",),
    "compiled": ("",),
    "bounds": ("layer: ", "cell: "),
    "exported": ("",),
}


def main(group: str) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    failed = refused = answered = 0
    for name, call in GROUPS[group]():
        print(name, end=" ", flush=True)
        try:
            call()
            answered += 1
            print("answered")
        except Exception as error:
            # A program checks the sizes of its operands itself.
            ours = isinstance(error, ValueError) or "cu_seqlens" in str(error) or "Guard failed" in str(error)
            fine = ours or (isinstance(error, TORCH) and name.startswith(REFUSALS.get(group, ())))
            refused, failed = refused + fine, failed + (not fine)
            print(f"{'' if fine else 'WRONG '}{type(error).__name__}: {str(error)[:150]!r}")
    # A heap that was written over shows itself now.
    for size in range(1, 4000, 7):
        torch.empty(size).fill_(0)
    gc.collect()
    print(f"{answered} answered, {refused} refused, {failed} wrong")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
