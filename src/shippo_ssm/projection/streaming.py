"""Streaming memories: C(t) [N, d] of samples with irregular times, in a channel frame that turns with the sensor.

Between two samples the signal is the straight line through both and A_R is constant, so a step from t_0 to t_1 is

    C(t_1) = E C(t_0) P(t_1, t_0) + sum_i g_i f(tau_i)^T P(t_1, tau_i),      g_i = w_i E(t_1, tau_i) B_L(tau_i),

with Gauss nodes tau_i and weights w_i: the numbers of `ProjectionMemory.evolve`. E and g_i depend on the step alone: cached by
dt for a stationary measure, computed for a block of steps at a time for LegS.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.projection._numerics import Array, as_real, expm, gauss
from shippo_ssm.projection._streaming_cpu import StreamOperands, streaming_update
from shippo_ssm.projection.measures import Measure
from shippo_ssm.projection.transport import Transport

# Samples per call of the kernel, steps of LegS computed ahead, and operators kept: bounds on memory.
_BLOCK, _AHEAD, _MAX_CACHED = 256, 64, 2048
_ROUNDING = 1e-13


@lru_cache(maxsize=64)
def _nodes(order: int) -> Array:
    """Gauss nodes on [0, 1], and 0, the start of the step: [order + 1]."""
    return np.append(gauss(order)[0], 0.0)


def num_nodes(measure: Measure, start: Array, stop: Array) -> int:
    """Gauss nodes per step, as in `evolve` of samples: enough for rounding."""
    moving = stop > start
    return max(6, 4 + math.ceil(measure.resolution(start[moving], stop[moving]))) if moving.any() else 6


def step_operators(measure: Measure, start: Array, stop: Array, order: int | None = None) -> Array:
    """[E g]^T [K, N + q, N] of steps from `start` [K] to `stop` [K], q = `order` nodes; a step of no time is the identity."""
    nodes, weights = gauss(order or num_nodes(measure, start, stop))
    still = stop <= start
    start, stop = np.where(still, 1.0, start), np.where(still, 2.0, stop)
    span = (stop - start)[:, None]
    operators = np.empty((len(start), measure.N + len(nodes), measure.N))
    operators[:, : measure.N] = np.swapaxes(measure.flow(stop, start), 1, 2)
    operators[:, measure.N :] = measure.impulse(stop[:, None], start[:, None] + span * nodes) * (span * weights)[..., None]
    operators[still] = np.eye(*operators.shape[1:])
    return operators


def begins(measure: Measure, times: Array) -> Array:
    """Which steps of times [B, T + 1] begin at 0 and end inside the window of a measure that does not close: [B, T]."""
    return (times[:, :-1] == 0) & (times[:, 1:] > 0) & (times[:, 1:] <= (0.0 if measure.closes else measure._memory()))


def pieces(times: Array, size: int) -> list[slice]:
    """Slices of at most `size` steps of times [B, T + 1]; the first step of a row in time stands alone."""
    edges = {0, times.shape[1] - 1}
    if not times[:, 0].all():
        first = np.flatnonzero(((times[:, :-1] == 0) & (times[:, 1:] > 0)).any(0))
        edges.update(first.tolist(), (first + 1).tolist())
    return [slice(i, min(i + size, end)) for begin, end in pairwise(sorted(edges)) for i in range(begin, end, size)]


def cut_long_steps(measure: Measure, times: Array, spans: Array) -> tuple[Array, Array, Array] | None:
    """Cut long steps `spans` [B, T] of times [B, T + 1] into parts [S]: whose they are, and their begins and ends [B, S].

    Begins and ends are fractions of the step. `None` if no step is longer than the memory. A row that begins in a step that
    is long for another row moves in the last part.
    """
    longest, found = measure._memory(), []
    if not spans.size or spans.max() <= longest:
        return None
    for index, span in enumerate(spans.T):
        cuts = measure.parts(span).copy()
        cuts[(times[:, index] == 0) & (span <= longest), :-1] = 0.0
        found.append((np.full(cuts.shape[1] - 1, index), cuts[:, :-1], cuts[:, 1:]))
    which, begin, end = zip(*found)
    return np.concatenate(which), np.concatenate(begin, axis=1), np.concatenate(end, axis=1)


def block_operators(measure: Measure, times: Array, steps: Array) -> tuple[Array, Array]:
    """The operators [K, N + q, N] of all distinct steps [B, T] of a piece of times [B, T + 1], and which is whose [B T].

    A row that begins inside the window has there what `evolve` has, the projection: nothing is forgotten yet.
    """
    start, stop = times[:, :-1], times[:, 1:]
    new = begins(measure, times)
    if new.any():
        assert steps.shape[1] == 1
        nodes, weights = gauss(num_nodes(measure, start, stop) + 4)
        operators, stop = step_operators(measure, start[:, 0], stop[:, 0], len(nodes)), stop[new[:, 0]]
        operators[new[:, 0], measure.N :] = measure._psi(stop, stop * nodes) * (stop * weights)[..., None]
        return operators, np.arange(len(times))
    if measure.stationary:
        # Differences of time stamps vary by rounding: equal to thirteen digits is equal.
        mantissa, exponent = np.frexp(steps.ravel())
        _, where, index = np.unique(np.ldexp(np.round(mantissa, 13), exponent), return_index=True, return_inverse=True)
        return step_operators(measure, np.zeros(len(where)), steps.ravel()[where]), index
    if (times == times[0]).all():
        return step_operators(measure, start[0], stop[0]), np.tile(np.arange(len(start[0])), len(times))
    return step_operators(measure, start.ravel(), stop.ravel()), np.arange(steps.size)


def step_logarithm(turn: Array) -> Array:
    """Logarithms of step matrices [.., w, w]: rotation vectors [.., 3] of rotations in space, [.., w, w] of others."""
    # Loads on first use: most streams have rotation vectors.
    from scipy.linalg import logm
    from scipy.spatial.transform import Rotation

    width = turn.shape[-1]
    flat = turn.reshape(-1, width, width)
    if width == 3 and np.abs(flat @ np.swapaxes(flat, 1, 2) - np.eye(3)).max() < 1e-6 and np.linalg.det(flat).min() > 0:
        return Rotation.from_matrix(flat).as_rotvec().reshape(*turn.shape[:-2], 3)
    found: Any = np.array([logm(matrix) for matrix in flat])
    if not np.isfinite(found).all() or np.abs(found.imag).max() > 1e-9:
        raise ValueError('StreamingMemory: `turn` is without a real logarithm; pass generators with transport="generator"')
    return found.real.reshape(turn.shape)


def _numbers(name: str, value: Any, expected: str) -> Array:
    """A NumPy array or a torch tensor as float64."""
    if hasattr(value, "detach"):
        if value.requires_grad:
            raise ValueError(f"StreamingMemory: `{name}` requires a gradient; use layers.StreamingLayer, or detach()")
        value = value.cpu().double().numpy()
    return as_real("StreamingMemory", name, value, expected)


class StreamingMemory:
    """A memory C(t) [N, d] of fixed size that is updated sample by sample, in coordinates that move with the sensor.

    A NaN marks a missing sample: the frame advances and nothing is written. Without a turn this holds for each channel, with
    one for each sensor (the w channels that turn together). A sample after a missing one, and the first, is held over its step.

    Args:
        measure: what is remembered, and in which basis: LegS, LegT, LagT or Fourier.
        channels: d; several sensors that share a frame stand side by side, w = 3 channels each.
        rate: samples per unit of time; `None` if every update gives its dt.
        transport: `None` if updates give rotations; "generator" if they give generators A_R; a `Transport` or one matrix A_R
            [w, w] if the motion is known beforehand.
        batch_size: B, for B streams side by side; samples then have a leading axis.

    Example:
        >>> from shippo_ssm.projection import LegT
        >>> memory = StreamingMemory(LegT(8, 1.0), 3, rate=100.0)
        >>> for _ in range(200):
        ...     memory.update([1.0, 0.0, 0.0], turn=[0.0, 0.0, 0.0])
        >>> bool(abs(memory.past(0.5)[0] - 1) < 1e-2)
        True
    """

    def __init__(
        self, measure: Measure, channels: int, rate: float | None = None, transport: Any = None, batch_size: int | None = None
    ) -> None:
        op = "StreamingMemory"
        if not isinstance(measure, Measure):
            raise ValueError(f"{op}: `measure` is {measure!r:.60}; expected LegS, LegT, LagT or Fourier, such as LegT(16, 2.0)")
        expect_size(op, "channels", channels, "a positive number of channels")
        if rate is not None:
            expect_real(op, "rate", rate, "samples per unit of time, > 0", 0, open_end=True)
        if batch_size is not None:
            expect_size(op, "batch_size", batch_size, "a positive number of streams")
        self.measure, self.channels, self.rate = measure, int(channels), rate
        self._turn_is_generator = isinstance(transport, str)
        if isinstance(transport, str) and transport != "generator":
            raise ValueError(f'{op}: `transport` is {transport!r}; expected None, "generator", a Transport or a matrix A_R')
        known = None if isinstance(transport, str) else transport
        if known is not None and not isinstance(known, Transport):
            known = Transport(known, len(np.atleast_1d(known)))
        self._transport: Transport | None = known
        self._check_width(1 if known is None else known.width)
        self._rows, self._batch = batch_size or 1, () if batch_size is None else (batch_size,)
        self._cache: dict[tuple[float, ...], Array] = {}
        self._as_torch = False
        self.reset()

    def __repr__(self) -> str:
        return f"StreamingMemory({self.measure!r}, {self.channels}, rate={self.rate})"

    def _check_width(self, width: int) -> None:
        if self.channels % width:
            came = f"`channels` is {self.channels} in a frame of {width} axes"
            raise ValueError(f"StreamingMemory: {came}; expected a multiple of {width}; use one memory per frame")

    def reset(self) -> None:
        """Forget everything: time 0, no samples."""
        self._time = np.zeros(self._rows)
        self._last = np.full((self._rows, self.channels), np.nan)
        # [B, d, N], as the kernel has it.
        self._state = np.zeros((self._rows, self.channels, self.measure.N))

    def _out(self, array: Array) -> Any:
        array = array if self._batch else array[0]
        if not self._as_torch:
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array))

    @property
    def state(self) -> Any:
        """C(t) [N, d], or [B, N, d]; a copy. A torch tensor if the last sample was one."""
        return self._out(np.swapaxes(self._state, 1, 2).copy())

    @property
    def time(self) -> Any:
        """Time since the start, a number, or [B]."""
        return self._time.copy() if self._batch else float(self._time[0])

    @property
    def last(self) -> Any:
        """The last sample [d], or [B, d]; NaN where it was missing. `load` takes it to go on exactly."""
        return self._out(self._last.copy())

    def load(self, state: Any, time: Any = 0.0, last: Any = None) -> None:
        """Continue from coefficients `state` [N, d] (or [B, N, d]) at `time`, after the sample `last` [d] (or [B, d])."""
        batch = self._batch
        coefficients, times = _numbers("state", state, "C"), _numbers("time", time, "t")
        times = np.broadcast_to(times, batch) if times.ndim == 0 else times
        sample = np.full((*batch, self.channels), np.nan) if last is None else _numbers("last", last, "f")
        shapes = (*batch, self.measure.N, self.channels), batch, (*batch, self.channels)
        for name, array, shape in zip(("state", "time", "last"), (coefficients, times, sample), shapes):
            if array.shape != shape:
                raise ValueError(f"StreamingMemory: `{name}` has shape {array.shape}; expected {shape}, as {self!r} has it")
        if not (np.isfinite(times).all() and (times >= 0).all()):
            raise ValueError(f"StreamingMemory: `time` is {times}; expected finite times >= 0")
        if not np.isfinite(coefficients).all() or np.isinf(sample).any():
            raise ValueError("StreamingMemory: `state` or `last` is not finite; NaN marks a missing sample in `last`")
        self._state = np.swapaxes(coefficients, -1, -2).reshape(self._rows, self.channels, -1).copy()
        self._time, self._last = times.reshape(-1).copy(), sample.reshape(self._rows, -1).copy()

    def past(self, ages: Any) -> Any:
        """What was seen `ages` [..] ago, in present coordinates: [.., d], or [B, .., d]; 0 where nothing is remembered."""
        back = _numbers("ages", ages, "ages >= 0")
        if not (back >= 0).all():
            raise ValueError(f"StreamingMemory: `ages` is {ages!r:.60}; expected ages >= 0; the future is not stored")
        found = np.zeros((self._rows, *back.shape, self.channels))
        for row in np.flatnonzero(self._time):
            known = back <= self._time[row] * (1 + 1e-12)
            tau = np.maximum(self._time[row] - back[known], 0.0)
            found[row, known] = self.measure.basis(self._time[row], tau) @ self._state[row].T
        return self._out(found)

    def update(self, sample: Any, dt: Any = None, turn: Any = None, *, return_all_states: bool = False) -> Any:
        """Take one sample [d] or a block [T, d] (in a batch [B, d] or [B, T, d]), as NumPy arrays or torch tensors.

        Args:
            sample: what the sensors said, in the coordinates of its own moment. `None` is one missing sample.
            dt: time since the previous sample, a number or one per sample; default 1 / rate. 0 writes nothing.
            turn: motion of the frame since the previous sample, one per sample: rotation vectors [.., 3] (gyroscope times
                dt), step matrices P [.., w, w], or, with transport="generator", A_R [.., w, w], per unit of time.
            return_all_states: return C after each sample.

        Returns:
            `None`, or the states [T, N, d] ([N, d] for one sample), with a leading [B] in a batch.
        """
        batch = self._batch
        self._as_torch = hasattr(sample, "detach")
        missing = np.full((*batch, self.channels), np.nan)
        values = missing if sample is None else _numbers("sample", sample, "numbers, NaN where one is missing")
        lead = values.shape[:-1]
        if len(lead) - len(batch) not in (0, 1) or lead[: len(batch)] != batch or values.shape[-1] != self.channels:
            one, block = (*batch, self.channels), (*batch, "T", self.channels)
            raise ValueError(f"StreamingMemory: `sample` has shape {values.shape}; expected {one} or a block {block}")
        if np.isinf(values).any():
            raise ValueError("StreamingMemory: `sample` is infinite; expected finite numbers, NaN where a sample is missing")
        steps = self._steps(dt, lead)
        turns = self._turns(turn, steps)
        values, steps = values.reshape(self._rows, -1, self.channels), steps.reshape(self._rows, -1)
        turns = None if turns is None else turns.reshape(*steps.shape, *turns.shape[len(lead) :])
        times = self._times(steps)
        cut = cut_long_steps(self.measure, times, steps)
        if cut is not None:
            values, steps, turns = self._cut(values, steps, turns, *cut)
            times = self._times(steps)
        states = np.empty((*steps.shape, self.channels, self.measure.N)) if return_all_states else None
        for part in pieces(times, _BLOCK):
            found = None if states is None else np.empty_like(states[:, part])
            grid = times[:, part.start : part.stop + 1]
            self._advance(values[:, part], grid, steps[:, part], None if turns is None else turns[:, part], found, dt is None)
            if states is not None:
                states[:, part] = found
        if states is None:
            return None
        if cut is not None:
            states = states[:, np.searchsorted(cut[0], np.arange(cut[0][-1] + 1), side="right") - 1]
        return self._out(np.swapaxes(states if len(lead) > len(batch) else states[:, 0], -1, -2))

    def _times(self, steps: Array) -> Array:
        """The times [B, T + 1] between which steps [B, T] lie."""
        return np.cumsum(np.concatenate([self._time[:, None], steps], axis=1), axis=1)

    def _width(self, turns: Array | None) -> int:
        """How many channels turn together."""
        return turns.shape[-1] if turns is not None else 1 if self._transport is None else self._transport.width

    def _cut(self, values: Array, steps: Array, turns: Array | None, which: Array, begin: Array, end: Array) -> Any:
        """Samples, steps and turns at the end of each part of the steps; see `cut_long_steps`."""
        before = np.concatenate([self._last[:, None], values[:, :-1]], axis=1)
        sensors = before.reshape(*before.shape[:2], -1, self._width(turns))
        # As the kernel does: a sensor that was missing is held over its step.
        held = np.isnan(sensors.sum(-1, keepdims=True)) & np.ones(sensors.shape[-1], bool)
        before = np.where(held.reshape(before.shape), values, before)
        values = (1 - end[..., None]) * before[:, which] + end[..., None] * values[:, which]
        share = end - begin
        if turns is not None:
            turns = turns[:, which] * share.reshape(*share.shape, *[1] * (turns.ndim - 2))
        return values, steps[:, which] * share, turns

    def _steps(self, dt: Any, lead: tuple[int, ...]) -> Array:
        """dt as an array of the shape `lead`."""
        if dt is None:
            if self.rate is None:
                raise ValueError("StreamingMemory: `dt` is missing; expected the time since the previous sample; or pass rate=")
            return np.full(lead, 1.0 / self.rate)
        steps = _numbers("dt", dt, "times since the previous sample")
        if steps.shape != lead and steps.ndim and steps.shape != lead[1:]:
            raise ValueError(f"StreamingMemory: `dt` has shape {steps.shape}; expected a number or {lead}, one per sample")
        if not (steps >= 0).all() or np.isinf(steps).any():
            raise ValueError("StreamingMemory: `dt` is negative or not finite; expected times >= 0; sort the samples")
        return np.broadcast_to(steps, lead)

    def _turns(self, turn: Any, steps: Array) -> Array | None:
        """Logarithms of the motions of the frame over the steps: rotation vectors [.., 3] or matrices [.., w, w]."""
        if turn is None:
            return None
        if self._transport is not None:
            raise ValueError("StreamingMemory: `turn` is given beside a transport; expected one of them; construct without")
        lead = steps.shape
        turns = _numbers("turn", turn, "rotation vectors or matrices, one per sample")
        square = turns.ndim == len(lead) + 2 and turns.shape[-1] == turns.shape[-2]
        if turns.shape[: len(lead)] != lead or not (square or (turns.shape == (*lead, 3) and not self._turn_is_generator)):
            kinds = f"rotation vectors {(*lead, 3)} or matrices [.., w, w]"
            raise ValueError(f"StreamingMemory: `turn` has shape {turns.shape}; expected {kinds}; generators are matrices")
        if not np.isfinite(turns).all():
            raise ValueError("StreamingMemory: `turn` is not finite; expected numbers; a missing turn is no motion, zeros")
        self._check_width(turns.shape[-1])
        if self._turn_is_generator:
            return turns * steps[..., None, None]
        return step_logarithm(turns) if square else turns

    def _advance(
        self, values: Array, times: Array, steps: Array, turns: Array | None, states: Array | None, at_rate: bool
    ) -> None:
        """One block: values [B, T, d], times [B, T + 1], steps [B, T]; fills `states` [B, T, d, N]."""
        # Loads on first use: the package needs neither torch nor a compiler.
        from shippo_ssm.engine.run import launch

        operators, index = self._operators(times, steps, at_rate)
        nodes = _nodes(operators.shape[1] - self.measure.N)
        turning, factors, width = "none", nodes, self._width(turns)
        if turns is not None:
            turning = "vector" if turns.ndim == 3 else "factors"
            factors = turns if turns.ndim == 3 else expm((1 - nodes)[:, None, None] * turns[:, :, None])
        elif self._transport is not None:
            turning, start, stop = "factors", times[:, :-1, None], times[:, 1:, None]
            factors = self._transport.P(*np.broadcast_arrays(stop, start + (stop - start) * nodes))
        scratch = np.empty(len(values) * (width * width + self.channels * operators.shape[1]))
        # Samples of several streams of one channel are strided, and `reshape` keeps that.
        arrays = (self._state, self._last, np.ascontiguousarray(values), factors, operators, nodes, scratch, states)
        flat = [None if array is None else array.reshape(-1) for array in arrays]
        sizes = steps.shape[1], self.measure.N, self.channels, len(nodes) - 1
        operands = StreamOperands._make([*flat, index, *sizes])
        launch(streaming_update, len(values), operands, turning=turning, width=width)
        self._time = times[:, -1].copy()

    def _operators(self, times: Array, steps: Array, at_rate: bool) -> tuple[Array, Array]:
        """`block_operators`, from the cache where all steps are one, or where the next ones are known."""
        first, rows, stationary = float(steps[0, 0]), steps.size, self.measure.stationary
        alike = rows == 1 or (stationary and np.abs(steps - first).max() <= _ROUNDING * first)
        if not alike or not (self.measure.closes or times[:, 0].all()):
            return block_operators(self.measure, times, steps)
        key = (0.0 if stationary else float(times[0, 0]), first)
        if key not in self._cache:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            # At a fixed rate the next steps of LegS are known: compute some of them together.
            edges = np.cumsum([key[0], *[first] * (_AHEAD if at_rate and not stationary else 1)])
            operators = step_operators(self.measure, edges[:-1], edges[1:])
            self._cache.update(((time, first), operator[None]) for time, operator in zip(edges.tolist(), operators))
        return self._cache[key], np.zeros(rows, dtype=np.int64)
