"""Lift a LegS memory: the same twelve coefficients per channel, in a frame that turns with the signal.

A slow two-channel signal s(t) is seen by a sensor that turns with angular speed w: f(t)^T = s(t)^T exp(w t Omega). A
LegS memory in fixed coordinates has to spend its coefficients on the turning and runs out of them; lifted by the right
generator A_R = w Omega, the same memory stores s itself. Both run online, by the same left operator; the lift adds the
term C A_R and nothing else.

    python examples/lift_legs.py
"""

import argparse

import numpy as np

from shippo_ssm.projection import LegS, ProjectionMemory, Transport

OMEGA = np.array([[0.0, -1.0], [1.0, 0.0]])
ORDER = 12


def turn(angle):
    """exp(angle Omega) [.., 2, 2]."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)


def slow(t):
    return np.stack([0.5 + np.sin(1.5 * t), 1.2 * np.cos(t) - 0.3 * t], -1)


def seen(speed):
    """The signal as the turning sensor sees it, time -> [2]."""
    return lambda t: np.einsum("...i,...ij->...j", slow(t), turn(speed * t))


def compare(speed: float, num_steps: int) -> dict[str, float]:
    """Relative errors over the past [0, 2] of both memories, and how far their online states are from the projection."""
    times, end = np.linspace(0.02, 2.0, num_steps), 2.0
    tau = np.linspace(0.02, end, 400)
    signal = seen(speed)
    errors = {}
    for name, memory in {
        "fixed": ProjectionMemory(LegS(ORDER)),
        "lifted": ProjectionMemory(LegS(ORDER), Transport(speed * OMEGA, 2)),
    }.items():
        state = memory.evolve(signal, times, keep="last")
        gap = memory.reconstruct(state, end, tau) - signal(tau)
        errors[name] = float(np.linalg.norm(gap) / np.linalg.norm(signal(tau)))
        projected = memory.project(signal, end)
        errors[f"{name} online"] = float(np.linalg.norm(state - projected) / np.linalg.norm(projected))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="two speeds, coarse steps: a second")
    smoke = parser.parse_args().smoke
    print(f"{ORDER} LegS coefficients per channel; relative error of the reconstructed past")
    print(f"{'speed':>6} {'fixed frame':>12} {'lifted':>12} {'online - projected':>20}")
    for speed in (0.0, 20.0) if smoke else (0.0, 2.0, 5.0, 10.0, 20.0, 40.0):
        errors = compare(speed, 200 if smoke else 1000)
        online = max(errors["fixed online"], errors["lifted online"])
        print(f"{speed:6.0f} {errors['fixed']:12.2e} {errors['lifted']:12.2e} {online:20.1e}")


if __name__ == "__main__":
    main()
