"""The page "A memory in the body frame", made from `results/body-frame.json`: tables, pictures, and what the figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE, RESULT, STATIC = "docs/body-frame.md", "results/body-frame.json", "docs/_static"
NAMES = {"fixed": "ordinary HiPPO", "lifted": "SHiPPO, gyroscope alone", "limit": "the limit"}
HEAD = """# A memory in the body frame

A robot, a phone or a drone turns. What its sensors said a second ago is in the coordinates of a second ago: to use it now, one
keeps a buffer and turns it, or keeps a filter for the orientation. A HiPPO memory of the sensor is worse off, because it
mixes coordinates of different moments into the same few numbers.

SHiPPO's memory can turn along. Let $A_R(t) = [\\omega]_\\times$ be the cross-product matrix of the gyroscope's rate. Then
$P(t, \\tau)^\\top$ is the rotation from the body frame at $\\tau$ to the body frame at $t$, and the coefficients

$$C_t = \\bar A\\, C_{t-1} R_t + \\bar B f_t^\\top, \\qquad R_t = \\exp(\\Delta\\, [\\omega_t]_\\times)$$

are those of the last seconds *in the present body frame*: N numbers per axis, one small product per sample, no buffer.

```python
import numpy as np
from scipy.spatial.transform import Rotation
from shippo_ssm.layers.online import online_memory
from shippo_ssm.projection import LegT

# Samples per second, seconds remembered, coefficients per axis.
rate, theta, N = 100.0, 1.0, 8
left, gain = (part[0] for part in online_memory("legt", N, theta).steps([1], 1 / rate))
# A compass on a plate that makes half a turn per second.
north, omega = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, np.pi])

C = np.zeros((N, 3))
for t in range(1, 201):
    # What the turning compass reads; exp([omega]x / rate), from the gyroscope; the memory.
    field = Rotation.from_rotvec(omega * t / rate).inv().apply(north)
    right = Rotation.from_rotvec(omega / rate).as_matrix()
    C = left @ C @ right + np.outer(gain, field)

# North of 0.1, 0.5 and 0.9 seconds ago, in coordinates of now.
ages = np.array([0.1, 0.5, 0.9])
past = LegT(N, theta).basis(theta, theta - ages) @ C
assert np.abs(past - field).max() < 1e-3  # north has not moved; the body has
```

## On recordings

The recordings are those inside the wheel of `scikit-kinematics` (BSD licence), read from the installed package:

```bash
pip install --no-deps scikit-kinematics
python examples/body_frame.py
python -m benchmarks.body_frame
```

The last command writes `results/body-frame.json`, and `python docs/generate.py` makes this page of it.
"""


def rows(result: dict[str, Any], name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of errors of one recording with these entries."""
    found = result["recordings"][name]["errors"]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def table(head: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines]) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def recordings(result: dict[str, Any]) -> str:
    lines = [
        [
            name,
            f"{found['seconds']:.0f} s",
            f"{found['rate']:.0f} Hz",
            f"{found['mean speed']:.0f}",
            f"{found['top speed']:.0f}",
        ]
        for name, found in result["recordings"].items()
    ]
    return table(["recording", "length", "samples", "mean turning, degrees/s", "fastest"], lines)


def headline(result: dict[str, Any]) -> str:
    """The two bars, for both sensors together, one line per window and order."""
    lines = []
    for name in result["recordings"]:
        for row in rows(result, name, stretch="turning", sensor="both"):
            if row["N"] >= 8:
                to_fixed, to_limit = row["lifted"] / row["fixed"], row["lifted"] / row["limit"]
                held = " and ".join(
                    f"{'' if ok else 'not '}{bar}" for ok, bar in ((to_fixed <= 0.5, "≤ 0.5"), (to_limit <= 1.3, "≤ 1.3"))
                )
                size = f"{row['theta']:.0f} s, N = {row['N']}"
                errors = [percent(row[key]) for key in NAMES]
                lines.append([name, size, *errors, f"{to_fixed:.2f}", f"{to_limit:.2f}", held])
    return table(["recording", "memory", *NAMES.values(), "over ordinary", "over the limit", "bars 0.5 and 1.3"], lines)


def sensors(result: dict[str, Any]) -> str:
    lines = []
    for name in result["recordings"]:
        for sensor in ("acceleration", "field"):
            for stretch in ("turning", "calm"):
                for row in rows(result, name, stretch=stretch, sensor=sensor, theta=1.0):
                    if row["N"] in (8, 16, 32):
                        lines.append([name, sensor, stretch, str(row["N"]), *(percent(row[key]) for key in NAMES)])
    return table(["recording", "sensor", "stretches", "N", *NAMES.values()], lines)


def direction(result: dict[str, Any]) -> str:
    lines = [
        [name, *(f"{found['direction'][key]['median']:.0f}° ({found['direction'][key]['p90']:.0f}°)" for key in NAMES)]
        for name, found in result["recordings"].items()
    ]
    return table(["recording", *NAMES.values()], lines)


def drift(result: dict[str, Any]) -> str:
    keys = [*NAMES, "off by 5 degrees/s"]
    lines = [[f"{row['theta']:.0f} s", str(row["N"]), *(percent(row[key]) for key in keys)] for row in result["drift"]]
    return table(["window", "N", *NAMES.values(), "SHiPPO, rate off by 5 degrees/s"], lines)


def cost(result: dict[str, Any]) -> str:
    if "cost" not in result:
        return "Not measured; `python -m benchmarks.body_frame --cost` does it.\n\n"
    found = result["cost"]
    lines = [[name, f"{value:.1f}"] for name, value in found["microseconds"].items()]
    size = f"one sensor with three axes, N = {found['N']}, {found['theta']:.0f} s at 256 Hz"
    return table([size, "µs per sample"], lines) + f"{found['machine']}.\n\n"


def page(root: Path) -> str:
    """docs/body-frame.md."""
    result = json.loads((root / RESULT).read_text(encoding="utf-8"))
    slow = result["recordings"]["x-IMU"]["speeds"][0]
    accuracy = {name: sum(values) / len(values) for name, values in result["classifier"].items()}
    field = rows(result, "x-IMU", stretch="turning", sensor="field", theta=1.0, N=16)[0]
    return (
        HEAD
        + "\n"
        + recordings(result)
        + f"""Three memories of the same size, 3 N numbers per sensor, by the same LegT operator and the same steps:

- **ordinary HiPPO**: the sensor's values as they come, in body coordinates;
- **SHiPPO, gyroscope alone**: the same, turned by $R_t$ at every sample; nothing else is known to it;
- **the limit**: the values turned into the world by the reference orientation, remembered there, and turned back. It is what
  a memory of this size can do if the orientation is known.

The reference is the orientation that the sensor's own filter found, and so is the truth here: the past, turned from its body
frame into the present one by the reference. The filter is no motion capture; it uses gyroscope, accelerometer and magnetometer
together. Errors are relative: 100 % is as wrong as remembering nothing. A stretch counts as turning where the mean speed over
the remembered time is above {result["turning"]:.0f} degrees per second.

![The last two seconds of the magnetic field in the present body frame](_static/body-frame-past.svg)

One moment of fast turning, the field's first axis, N = 16. What the turning sensor measured (dotted) is not what is wanted
(black): the same field in the coordinates of now.

## What is remembered

Accelerometer and magnetometer together, one unit being one g and the mean field, on turning stretches. The bars were set before
the measurement: at most half of ordinary HiPPO's error, and within 1.3 of the limit. The second holds in every row; the first
on the Xsens in every row, and on the x-IMU, which was shaken, from 16 coefficients per second on. To take both sensors together
was decided after each had been looked at by itself (below).

"""
        + headline(result)
        + """![Error over the age of what is remembered, and over turning speed](_static/body-frame-errors.svg)

Each sensor by itself, the last second:

"""
        + sensors(result)
        + f"""Two things stand in the way of zero. **The acceleration** of a hand-held sensor shakes faster than a few
coefficients per second can follow, in any frame: SHiPPO reaches the limit, but the limit itself is far from zero at small N.
**The field** is smooth, and there the limit is close to zero; what SHiPPO gets wrong ({percent(field["lifted"])} against
{percent(field["fixed"])} of ordinary HiPPO, x-IMU, N = 16) is by how much the gyroscope and the reference disagree, and it is
{field["lifted"] / field["limit"]:.1f} times the limit, which has the reference's orientation by construction.

**The direction of gravity a second ago**, or rather of what the accelerometer felt then: angle between what is remembered and
the truth on turning stretches, N = 16, two seconds; median, and in brackets the 90 % quantile.

"""
        + direction(result)
        + "## What it costs\n\n"
        + cost(result)
        + f"""The state is {3 * 16} numbers; the buffer of the same two seconds has {3 * 512:,}.

## As a PyTorch layer

`lift("legt", Orthogonal(3), ...)` with the gyroscope as its controller is the same memory: `gyroscope_memory` of
`examples/body_frame.py` sets the weights that make the coordinates of $R_t$ from the gyroscope's channels, and freezes them; a
test holds its states against the loop above. What is read from the memory is learned, so it stands in front of a classifier:

```text
class Sides(nn.Module):
    def __init__(self, memory):
        self.memory = memory                                     # LiftedMemory, [B, T, 6] -> [B, T, 6]
        self.head = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 6))

    def forward(self, u):
        return self.head(self.memory(u)[:, -1])
```

A light flashes for a sixteenth of a second somewhere around the x-IMU; which side of the body faces it up to a second later?
The turning is the recorded one, the light is made up. Trained on the first two thirds of the recording, tested on the last,
mean of {len(result["classifier"]["fixed"])} seeds: **{accuracy["lifted"]:.2f}** with the gyroscope as controller,
**{accuracy["fixed"]:.2f}** with the same layer and `use_right = False`, which has the gyroscope's channels as inputs too.
Chance is 0.17.

## Where it does not help

- **Slow turning.** Below {slow["to"]} degrees per second ordinary HiPPO is wrong by {percent(slow["fixed"])} and SHiPPO by
  {percent(slow["lifted"])}: there is little to gain where the frame hardly moves.
- **Long windows.** The gyroscope's errors add up with the age of what is remembered. The field again, the whole recording, 16
  coefficients per second; in the last column the rate is wrong by 5 degrees per second, as a cheap sensor's may be before it is
  calibrated. Over minutes a filter that corrects the orientation is needed, and its rate can drive $A_R$ just as well.

"""
        + drift(result)
        + """- **A buffer is enough** where memory is plentiful and nothing has to be learned: it holds the samples exactly, and
  can be turned when it is read. The memory is for a fixed small state, for every sample a finished answer, and as a layer
  that passes gradients on.
- **Positions.** A rotation of the axes is all that is carried along; how far the body has moved is not.
"""
    )


def draw(root: Path) -> None:
    """Both pictures."""
    from shippo_ssm.lab.plots import BOUND, OURS, PLAIN, new_figure, save

    colours = {"fixed": PLAIN, "lifted": OURS, "limit": BOUND}
    result = json.loads((root / RESULT).read_text(encoding="utf-8"))
    figure, (axes,) = new_figure(7.5, 3.2)
    ages, lines = result["trace"]["ages"], result["trace"]["lines"]
    axes.plot(ages, lines["measured"], ":", color="0.5", label="as measured, in the body frame of then")
    axes.plot(ages, lines["wanted"], "-", color="black", lw=2.5, label="wanted: in the body frame of now")
    for name in NAMES:
        axes.plot(ages, lines[name], "--" if name == "limit" else "-", color=colours[name], label=NAMES[name])
    axes.invert_xaxis()
    axes.set_xlabel("seconds ago")
    axes.set_ylabel("field, first axis")
    axes.legend(fontsize=8, ncols=2)
    save(figure, root / STATIC / "body-frame-past.svg")
    figure, panels = new_figure(8.5, 3.2, 2)
    found = result["recordings"]["x-IMU"]
    for name in NAMES:
        style = "--" if name == "limit" else "-"
        panels[0].plot(
            [row["age"] for row in found["ages"]],
            [row[name] for row in found["ages"]],
            style,
            color=colours[name],
            label=NAMES[name],
        )
        middle = [(row["from"] + row["to"]) / 2 for row in found["speeds"]]
        panels[1].plot(middle, [row[name] for row in found["speeds"]], style, marker="o", color=colours[name])
    panels[0].set_xlabel("age of what is remembered, seconds")
    panels[1].set_xlabel("mean turning speed, degrees per second")
    for axes, title in zip(panels, ("x-IMU, turning stretches, 2 s, N = 16", "x-IMU, by speed, 1 s, N = 16")):
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("relative error")
        axes.set_ylim(0)
    panels[0].legend(fontsize=8)
    save(figure, root / STATIC / "body-frame-errors.svg")


def write(root: Path) -> None:
    """The page and its pictures, in the checkout `root`."""
    draw(root)
    (root / PAGE).write_text(page(root), encoding="utf-8")
