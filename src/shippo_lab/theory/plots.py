"""Plots of a projection memory: the signal and its reconstructions, and the moving channel frame.

Needs the `plot` extra (matplotlib), imported on first use. Every function returns a `Figure` and changes no global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shippo_ssm.projection._numerics import as_time
from shippo_ssm.projection.memory import ProjectionMemory
from shippo_ssm.projection.signals import as_signal
from shippo_ssm.projection.transport import Transport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _figure(rows: int, height: float) -> tuple[Figure, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; install the extra: pip install 'shippo-ssm[plot]'") from error
    figure = Figure(figsize=(7.0, height * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def plot_reconstruction(memory: ProjectionMemory, f: Any, t: float, *, num_points: int = 400) -> Figure:
    """Per channel: the signal on [0, t], its HiPPO reconstruction (fixed frame) and its SHiPPO reconstruction (moving frame).

    Args:
        memory: a memory with a transport; both reconstructions use its measure.
        f: callable time -> [d] or `Samples`.
        t: the time of the memory.
    """
    t = as_time("t", t)
    signal = as_signal(f)
    tau = np.linspace(max(memory.measure._start(t), 0.0), t, num_points)
    fixed = ProjectionMemory(memory.measure)
    curves = [
        ("signal", signal(tau), "0.2", "-"),
        ("HiPPO", fixed.reconstruct(fixed.project(signal, t), t, tau), "tab:orange", "--"),
        ("SHiPPO", memory.reconstruct(memory.project(signal, t), t, tau), "tab:blue", ":"),
    ]
    figure, axes = _figure(curves[0][1].shape[1], 1.5)
    for channel, axis in enumerate(axes):
        for name, values, color, style in curves:
            axis.plot(tau, values[:, channel], label=name, lw=1.6, color=color, ls=style)
        axis.set_ylabel(f"channel {channel + 1}")
    axes[0].set_title(f"{memory.measure!r} read at t = {t:g}", fontsize=10)
    axes[0].legend(fontsize=8, ncols=3)
    axes[-1].set_xlabel("tau")
    return figure


def plot_frame(transport: Transport, t: float, *, num_points: int = 400) -> Figure:
    """The moving frame: rows of V(s) = P(s, 0) for s in [0, t], one panel per row; and log det V(s)."""
    t = as_time("t", t)
    s = np.linspace(0.0, t, num_points)
    frame = transport.V(s)
    figure, axes = _figure(transport.width + 1, 1.3)
    for row, axis in enumerate(axes[:-1]):
        for column in range(transport.width):
            axis.plot(s, frame[:, row, column], lw=1.4, label=f"V[{row + 1}, {column + 1}]")
        axis.set_ylabel(f"row {row + 1}")
        axis.legend(fontsize=7, ncols=transport.width)
    volume = np.linalg.slogdet(frame)[1]
    axes[-1].plot(s, volume, color="0.2", lw=1.4)
    # Do not zoom into rounding errors of a frame that preserves volume.
    axes[-1].set_ylim(min(-0.1, 1.1 * volume.min()), max(0.1, 1.1 * volume.max()))
    axes[-1].set_ylabel("log det V")
    axes[-1].set_xlabel("s")
    return figure
