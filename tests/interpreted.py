"""The process in which Triton's kernels run on a CPU.

Triton reads TRITON_INTERPRET when it is imported, so its interpreter needs a process of its own: tests must not change what
other tests of the same worker see. Each line of standard input is a request, {"check": name, ...arguments}; each line of
standard output is the answer, error ratios by name or the error itself. `Interpreter` is the other end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Interpreter:
    """Starts the process and asks it."""

    def __init__(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.interpreted"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, check: str, **arguments: Any) -> dict[str, Any]:
        """What a check answers; what it raises there is raised here."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"check": check, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer

    def close(self) -> None:
        self.process.communicate("")


def scan(dtype: str, cu_seqlens: list[int] | None = None, backend: str = "triton", **case: Any) -> dict[str, float]:
    """Error ratios of y, the last state and all gradients against the float64 reference loop."""
    import torch

    from tests.shippo_ssm.scan.conftest import reference_run, rms_ratio, run_with_gradients

    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    recurrence, state, expected = reference_run(None if cu_seqlens is None else tuple(cu_seqlens), **case)
    operands = recurrence.map(lambda tensor: tensor.to(getattr(torch, dtype)))
    got = run_with_gradients(operands, state.to(operands.value.dtype), cu_seqlens=bounds, backend=backend)
    return {name: rms_ratio(got[name], expected[name]) for name in expected}


def segmented(**case: Any) -> dict[str, float]:
    """Error ratios of a scan that is cut into segments, all of it by Triton's kernels, against the float64 reference loop."""
    from unittest import mock

    from shippo_ssm import dispatch
    from shippo_ssm.scan import api

    with mock.patch.object(api, "scan_kernels", return_value="triton"), mock.patch.object(dispatch, "SEGMENT_LENGTH", 3):
        return scan("float64", backend="segmented", **case)


def invalid_bounds(cu_seqlens: list[int], **case: Any) -> dict[str, bool]:
    """Whether the results for invalid boundaries are all NaN; nothing outside of the operands is read."""
    import torch

    from shippo_ssm.scan import triton
    from tests.shippo_ssm.scan.conftest import make_recurrence

    recurrence, state = make_recurrence(states=len(cu_seqlens) - 1, **case)
    recurrence.value.requires_grad_()
    y, final_state = triton.run(recurrence, state, torch.tensor(cu_seqlens))
    (dread,) = torch.autograd.grad(final_state.sum() + y.sum(), recurrence.value)
    return {"final_state": bool(final_state.isnan().all()), "gradient": bool(dread.isnan().any())}


def step(dtype: str, tokens: int = 3, **options: Any) -> dict[str, float]:
    """A layer's steps by Triton's kernel against the same steps in torch."""
    from unittest import mock

    import torch

    from shippo_ssm import Shippo
    from shippo_ssm.layers import cell
    from tests.shippo_ssm.scan.conftest import rms_ratio

    layer = Shippo(12, **options).to(getattr(torch, dtype))
    u, results = torch.randn(tokens, 2, 12, dtype=getattr(torch, dtype)), []
    for taken in (True, False):
        calls = mock.Mock(return_value=taken)
        slow, fast = (
            mock.patch("shippo_ssm.layers.decode.find_plan", return_value=None),
            mock.patch.object(cell, "uses_gpu_step", calls),
        )
        with torch.no_grad(), slow, fast:
            state, outputs = layer.init_state(2), []
            for token in u:
                y, state = layer.step(token, state)
                outputs.append(y)
        assert calls.call_count == tokens
        results.append((torch.stack(outputs), *state.cell))
    return {name: rms_ratio(a, b) for name, a, b in zip(("y", "memory", "write", "value"), *results)}


def half(dtype: str, **case: Any) -> dict[str, float]:
    """The public scan on half-precision operands against the reference on the same numbers in float32."""
    import torch

    from shippo_ssm.scan import transport_scan
    from tests.shippo_ssm.scan.conftest import make_recurrence, rms_ratio

    recurrence, state = make_recurrence(dtype=getattr(torch, dtype), **case)
    results = []
    for backend, kept in (("triton", recurrence.value.dtype), ("reference", torch.float32)):
        assert recurrence.right is not None
        leaves = [tensor.detach().to(kept).requires_grad_() for tensor in (*recurrence[:5], recurrence.right)]
        options = {"initial_state": state.float(), "output_final_state": True, "backend": backend}
        y, final_state = transport_scan(*leaves, **options)
        gradients = torch.autograd.grad(y.float().sum(), leaves)
        assert [gradient.dtype for gradient in gradients] == [kept] * len(leaves)
        results.append([y, final_state, *gradients])
    names = ("y", "final_state", *(f"gradient of {name}" for name in recurrence._fields))
    return {name: rms_ratio(ours, theirs) for name, ours, theirs in zip(names, *results)}


def opcheck(**case: Any) -> dict[str, str]:
    """torch's own check of both operators, which raises; returns what "auto" takes."""
    import torch

    from shippo_ssm.scan import resolve_backend, triton
    from tests.shippo_ssm.scan.conftest import make_recurrence

    recurrence, state = make_recurrence(**case)
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (*recurrence, state)]
    torch.library.opcheck(triton._scan, (*leaves, None, True), test_utils=("test_schema", "test_faketensor"))
    y, final_state, kept = triton._scan(*recurrence, state, None, True)
    operands = (*recurrence, state, None, kept, torch.ones_like(y), torch.ones_like(final_state))
    torch.library.opcheck(triton._scan_backward, operands, test_utils=("test_schema", "test_faketensor"))
    return {"auto": str(resolve_backend(recurrence.value))}


def compiled(**case: Any) -> dict[str, float]:
    """Gradients of a scan under `torch.compile`, which makes one graph of it, against those without."""
    import torch

    from shippo_ssm.scan import transport_scan
    from tests.shippo_ssm.scan.conftest import make_recurrence, rms_ratio

    recurrence, _ = make_recurrence(**case)
    assert recurrence.right is not None
    leaves = [tensor.detach().requires_grad_() for tensor in (*recurrence[:5], recurrence.right)]

    def loss(*operands: torch.Tensor) -> torch.Tensor:
        return transport_scan(*operands, backend="triton")[0].square().sum()

    one_graph = torch.compile(loss, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(run(*leaves), leaves) for run in (one_graph, loss)]
    return {f"result {k}": rms_ratio(ours, theirs) for k, (ours, theirs) in enumerate(zip(*results))}


def action(family: str, width: int, dtype: str, scale: float = 1.0, items: int = 33) -> dict[str, float]:
    """A right action and the gradients of its arguments against the torch formula in float64."""
    import torch

    from shippo_ssm.actions import expm, get_family
    from tests.shippo_ssm.scan.conftest import rms_ratio

    random = torch.Generator().manual_seed(0)
    if family == "expm":
        function, given = expm, [torch.randn(items, width, width, generator=random)]
    else:
        made: Any = get_family(family, width)
        function = made.dense
        given = [torch.randn(items, made.num_coordinates, generator=random), torch.rand(items, generator=random)]
    cotangent = torch.randn(items, width, width, generator=random)
    results = []
    for backend, kind in (("triton", getattr(torch, dtype)), ("torch", torch.float64)):
        # The first argument alone is scaled: a step is a step.
        leaves = [(scale * given[0]).to(kind).requires_grad_(), *(tensor.to(kind).requires_grad_() for tensor in given[1:])]
        right = function(*leaves, backend=backend)
        results.append([right, *torch.autograd.grad(right, leaves, cotangent.to(kind))])
    return {f"result {k}": rms_ratio(ours, theirs) for k, (ours, theirs) in enumerate(zip(*results))}


def bench() -> dict[str, Any]:
    """What `shippo bench --device cuda` does, on a shape that the interpreter can bear: errors and times by candidate."""
    from benchmarks.device import measure
    from benchmarks.problem import Shape

    section = measure(Shape(batch=2, length=2, groups=2, order=3, width=2), "cpu", rounds=1, budget=0.0)
    return {record["name"]: record for record in section["candidates"]}


def main() -> None:
    import torch
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        # A launch has made the language interpreted that our kernels see; to do so again for every call inside of it would
        # take half of the time. Triton's own functions see another module.
        if self.fn.__module__.startswith("triton."):
            _patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    InterpretedFunction.__call__ = call
    # `torch.empty` gives NaN, so that a kernel that forgets to write a place is caught.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    served = (scan, segmented, invalid_bounds, step, half, opcheck, compiled, action, bench)
    checks = {check.__name__: check for check in served}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = checks[request.pop("check")](**request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
