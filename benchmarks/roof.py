"""The roof: what one pass cannot be faster than, t_roof = max(compulsory bytes / bandwidth, FMA work / FMA rate).

Data path: a `Shape` gives, for "forward" and "both" (forward and backward), the floats that must be read and written per cell
(`traffic`) and the multiply-adds that must be done per cell (`fma_work`); measured rates turn them into a `Roof`, which
names its active term. A cell is one position of one group.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.problem import Shape

PASSES = ("forward", "both")
# Instructions of one vectorised exponential: range reduction, a polynomial of degree 6, scaling by a power of two.
EXP_WORK = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """A lower bound on a time, with the terms it is the larger of."""

    bytes_moved: int
    fma: int
    bandwidth: float
    """Bytes per second of the copy."""
    fma_rate: float
    """Multiply-adds per second of the matrix product."""

    @property
    def bandwidth_seconds(self) -> float:
        """Compulsory bytes over bandwidth."""
        return self.bytes_moved / self.bandwidth

    @property
    def fma_seconds(self) -> float:
        """FMA work over FMA rate."""
        return self.fma / self.fma_rate

    @property
    def seconds(self) -> float:
        """The larger term."""
        return max(self.bandwidth_seconds, self.fma_seconds)

    @property
    def active(self) -> str:
        """The name of the larger term."""
        return "bandwidth" if self.bandwidth_seconds >= self.fma_seconds else "fma"

    def as_dict(self) -> dict[str, float | str]:
        """Terms, rates and the name of the active term."""
        return {
            "seconds": self.seconds,
            "active": self.active,
            "bytes": self.bytes_moved,
            "fma": self.fma,
            "bandwidth": self.bandwidth,
            "fma_rate": self.fma_rate,
            "bandwidth_seconds": self.bandwidth_seconds,
            "fma_seconds": self.fma_seconds,
        }


def traffic(shape: Shape, scan_pass: str, *, has_right: bool = True) -> list[tuple[int, int]]:
    """Floats read and written per cell, one pair per pass over the operands.

    Forward reads step, write, read, value and right, and writes y. Backward reads them again with dy, and writes their
    gradients. `drift` and the states at both ends are shared by many cells and not counted.

    Example:
        >>> traffic(Shape(order=32, width=4), "both")
        [(85, 4), (89, 85)]
    """
    _check(scan_pass)
    vectors = -(-2 * shape.order * shape.num_sets // shape.groups)
    operands = 1 + vectors + shape.width + has_right * shape.width**2
    forward = (operands, shape.width)
    return [forward] if scan_pass == "forward" else [forward, (operands + shape.width, operands)]


def bytes_moved(shape: Shape, scan_pass: str, *, has_right: bool = True) -> int:
    """Compulsory bytes of a float32 pass.

    Example:
        >>> bytes_moved(Shape(), "forward") / 2**20
        178.0
    """
    return 4 * shape.cells * sum(read + written for read, written in traffic(shape, scan_pass, has_right=has_right))


def fma_work(shape: Shape, scan_pass: str, *, has_right: bool = True) -> int:
    """Multiply-adds of a pass by the cheaper way we know for it, the recurrence as written or the moving frame.

    As written, a forward cell is N (P^2 + 3 P + e): H R, its decay, the source, the answer, and e for the exponential. A
    backward cell does the first two again, one N P each for the gradients of read, write, value, left and source, and 2 N P^2
    for those of R and of the state before. The frame replaces every N P^2 by products and inverses of P x P matrices.
    """
    _check(scan_pass)
    order, width = shape.order, shape.width
    direct = order * width**2 if has_right else 0
    framed = 2 * width**3 + 2 * width**2 if has_right else 0
    transport = min(direct, framed)
    forward = order * (3 * width + EXP_WORK) + transport
    if scan_pass == "forward":
        return shape.cells * forward
    backward = order * (2 * width + EXP_WORK) + order * (6 * width + 2) + min(3 * direct, 2 * framed)
    return shape.cells * (forward + backward)


def roof(shape: Shape, scan_pass: str, bandwidth: float, fma_rate: float, *, has_right: bool = True) -> Roof:
    """The roof of one pass from measured rates.

    Args:
        shape: sizes of the scan.
        scan_pass: "forward" or "both".
        bandwidth: bytes per second of a copy with this pass's reads and writes, on its threads.
        fma_rate: multiply-adds per second on its threads.
        has_right: whether there is a right action.

    Example:
        >>> roof(Shape(), "forward", bandwidth=20e9, fma_rate=1e11).active
        'bandwidth'
    """
    return Roof(
        bytes_moved=bytes_moved(shape, scan_pass, has_right=has_right),
        fma=fma_work(shape, scan_pass, has_right=has_right),
        bandwidth=bandwidth,
        fma_rate=fma_rate,
    )


def _check(scan_pass: str) -> None:
    if scan_pass not in PASSES:
        raise ValueError(f"scan_pass is {scan_pass!r}; expected 'forward' or 'both'")
