"""Targets (required and goal) and what was reached, from the dictionary of a run.

Data path: `targets()` lists the rows with the path of arithmetic that reads each figure out of a run's sections; `verdict(run)`
fills in what was reached. A row whose section is not in the run, or whose peer is missing, has no figure and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One ratio that a run is judged by."""

    what: str
    required: float
    goal: float
    at_least: bool
    """Whether larger is better."""
    read: Callable[[dict[str, Any]], float] = field(repr=False)

    def met(self, reached: float, wanted: float) -> bool:
        """Whether a figure is as good as wanted."""
        return reached >= wanted if self.at_least else reached <= wanted


def find(run: dict[str, Any], name: str) -> dict[str, Any]:
    """The record of a candidate in the two-thread scan; `KeyError` where it has no time."""
    record = next((record for record in run["sections"]["scan"]["candidates"] if record["name"] == name), None)
    if record is None or record["status"] != "ok":
        raise KeyError(f"{name} has no time: {'not in the run' if record is None else record['reason']}")
    return record


def ahead(run: dict[str, Any], peer: str, scan_pass: str, ours: str = "shippo fused") -> float:
    """How many times faster ours is than a peer."""
    return find(run, peer)[scan_pass]["median"] / find(run, ours)[scan_pass]["median"]


def targets() -> tuple[Target, ...]:
    """The rows, in order. Ratios are inside one run, at B16 T512 N32, G P = 256 and P = 4 unless a row says more, float32, two
    threads; a row with several widths or passes is judged by the worst."""

    def expm_ahead(run: dict[str, Any]) -> float:
        candidates = run["sections"]["expm"]["candidates"]
        return candidates["torch.linalg.matrix_exp"]["both"]["median"] / candidates["shippo expm"]["both"]["median"]

    def width_points(run: dict[str, Any], *widths: int) -> list[dict[str, Any]]:
        points = {point["shape"]["width"]: point for point in run["sections"]["widths"]["points"]}
        return [points[width] for width in widths]

    def worst_over_roof(scan_pass: str, *widths: int) -> Callable[[dict[str, Any]], float]:
        return lambda run: max(point[scan_pass]["over_roof"] for point in width_points(run, *widths))

    def wide_ahead(scan_pass: str) -> Callable[[dict[str, Any]], float]:
        def read(run: dict[str, Any]) -> float:
            (point,) = width_points(run, 16)
            peer = point["peers"]["jax.lax.scan"]
            if peer["status"] != "ok":
                raise KeyError(f"jax.lax.scan has no time: {peer['reason']}")
            return peer[scan_pass]["median"] / point[scan_pass]["median"]

        return read

    def halves_ratio(run: dict[str, Any]) -> float:
        section = run["sections"]["halves"]
        return section["bfloat16"]["both"]["median"] / section["float32"]["both"]["median"]

    def slowest_kernel(run: dict[str, Any]) -> float:
        return max(kernel["seconds"] for kernel in run["sections"]["compilation"]["kernels"])

    def long_over_short(run: dict[str, Any]) -> float:
        points = sorted(run["sections"]["sweeps"]["constant_tokens"], key=lambda point: point["shape"]["length"])
        return max(points[-1][scan_pass]["median"] / points[0][scan_pass]["median"] for scan_pass in ("forward", "both"))

    def over_products(*names: str) -> Callable[[dict[str, Any]], float]:
        return lambda run: max(run["sections"]["training"]["models"][name]["over_products"] for name in names)

    def training_ratio(run: dict[str, Any]) -> float:
        models = run["sections"]["training"]["models"]
        return models["StructGen-Split"]["median"] / models["No-right"]["median"]

    def memory_ratio(run: dict[str, Any]) -> float:
        record = next(record for record in run["sections"]["memory"] if record["name"] == "shippo fused")
        return record["ratio"]

    def faster(peer: str, scan_pass: str) -> Callable[[dict[str, Any]], float]:
        return lambda run: ahead(run, peer, scan_pass)

    def over_roof(scan_pass: str) -> Callable[[dict[str, Any]], float]:
        return lambda run: find(run, "shippo fused")[scan_pass]["over_roof"]

    def row(
        what: str, required: float, goal: float, read: Callable[[dict[str, Any]], float], *, at_least: bool = True
    ) -> Target:
        return Target(what=what, required=required, goal=goal, at_least=at_least, read=read)

    return (
        row("P = 4: forward time over its roof", 1.4, 1.2, over_roof("forward"), at_least=False),
        row("P = 4: forward+backward time over its roof", 2.2, 1.6, over_roof("both"), at_least=False),
        row("P = 8, 16: forward time over its roof", 2.5, 1.5, worst_over_roof("forward", 8, 16), at_least=False),
        row("P = 8, 16: forward+backward time over its roof", 3, 2, worst_over_roof("both", 8, 16), at_least=False),
        row("P = 1, 2: forward+backward time over its roof", 2, 1.5, worst_over_roof("both", 1, 2), at_least=False),
        row("ahead of jax.lax.scan, forward", 10, 20, faster("jax.lax.scan", "forward")),
        row("ahead of jax.lax.scan, forward+backward", 15, 40, faster("jax.lax.scan", "both")),
        row("ahead of jax.lax.scan at P = 16, forward", 10, 20, wide_ahead("forward")),
        row("ahead of jax.lax.scan at P = 16, forward+backward", 12, 25, wide_ahead("both")),
        row("ahead of a PyTorch loop, forward+backward", 100, 200, faster("PyTorch loop", "both")),
        row("ahead of mambapy's pscan, forward", 20, 40, faster("mambapy pscan", "forward")),
        row("ahead of mambapy's pscan, forward+backward", 15, 40, faster("mambapy pscan", "both")),
        row("bfloat16 operands over float32, forward+backward", 0.75, 0.6, halves_ratio, at_least=False),
        row("expm ahead of torch.linalg.matrix_exp, forward+backward", 100, 150, expm_ahead),
        row("seconds to compile a kernel, the slowest", 6, 4, slowest_kernel, at_least=False),
        row("one sequence of 65,536 over 64 of 1,024", 1.1, 1.0, long_over_short, at_least=False),
        row(
            "training step over its own matrix products, No-right and StructGen-Split",
            1.3,
            1.2,
            over_products("No-right", "StructGen-Split"),
            at_least=False,
        ),
        row("training step of StructGen-Split over No-right", 1.5, 1.3, training_ratio, at_least=False),
        row(
            "growth of time with T from 1,024 to 65,536, exponent",
            1.05,
            1.01,
            lambda run: max(run["sections"]["sweeps"]["exponent"].values()),
            at_least=False,
        ),
        row("peak extra memory over operands and gradients", 0.25, 0.1, memory_ratio, at_least=False),
    )


def verdict(run: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per target: `what`, `required`, `goal`, `at_least`, `reached`, and `result`.

    `result` is "goal", "required", "missed", or "not measured" with the reason in `why` and `reached` None.
    """
    rows = []
    for target in targets():
        row: dict[str, Any] = {
            "what": target.what,
            "required": target.required,
            "goal": target.goal,
            "at_least": target.at_least,
        }
        try:
            reached = float(target.read(run))
        except (KeyError, StopIteration, TypeError) as error:
            row |= {"reached": None, "result": "not measured", "why": str(error).strip("'\"") or "not in the run"}
        else:
            result = (
                "goal" if target.met(reached, target.goal) else "required" if target.met(reached, target.required) else "missed"
            )
            row |= {"reached": reached, "result": result}
        rows.append(row)
    return rows
