"""The page "Cards", made from `results/gpu.json`: what runs on a GPU, what was proved without one, what is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE, RESULT = "docs/gpu.md", "results/gpu.json"
HEAD = """# Cards

What runs on a GPU, what was proved without one, and what nobody knows until somebody runs it. **No number on this
page was measured on a card.** The page is made from `results/gpu.json` by `python docs/generate.py`.

## What runs

```bash
pip install 'shippo-ssm[gpu]'
```

brings Triton. With tensors on a card (CUDA, or ROCm, which torch calls the same) `backend="auto"` then takes

- `transport_scan`: the kernels of `scan/_triton_kernels.py`, forward and backward, for all that the CPU kernels take:
  with and without a right action, constant or varying drift, rank-r writes, first and last states with gradients,
  packed sequences, P up to 16, N padded to a power of two. Operands in bfloat16 and float16 are loaded as they are;
  the state is float32.
- few long sequences (B G below 512): segments, `scan/segments.py`: their summaries, the prefix of these and the
  replay of each segment are kernels, and the host never waits for the card.
- a single position that continues a state without gradients (`Shippo.step`, generation): one kernel, state in, state
  out (`layers/_triton_kernels.py`).
- `expm`, split products and rotations with their gradients: `actions/_triton_kernels.py`, P up to 16. Up to P = 4 a
  lane holds a whole matrix; wider ones lie across lanes. What is wider still takes torch's batched products.

`resolve_backend` says what is taken and why; without Triton it is `chunked`. A kernel is compiled when it is first
called, never at import. Which of a few configurations is the fastest is measured at the first call with operands of a
kind, and kept on disk. Under `torch.compile` each is one operator. The decode step has fixed shapes and exchanges no
word between card and host, so that a CUDA graph can hold it after a first call; the short convolution, gates and
projections around it are torch's operators on a card.

## How a program works

A program is one sequence and a few groups (BG); it keeps their states in registers from the first position to the
last, BT positions in a round. N lies along the lanes of a warp, the P columns are P registers of a lane. Loads run
STAGES - 1 rounds ahead through shared memory; the lines of a round, write and read, are loaded as one tile. Sums over
N are made for sixteen numbers at once: the lanes exchange them so that each adds up all numbers of one sum. On
Blackwell two neighbours of N in a lane go through one instruction (`fma.rn.f32x2`), in inline PTX, since the compiler
finds few of these pairs by itself. **Triton's interpreter runs no PTX**: there, and on other cards, the same places
hold the plain product and sum.

The backward pass is two kernels. The adjoint goes back through time alone, as the forward pass goes forth, and leaves
itself at the ends of two or more long spans, the first of which it need not enter. Then all spans are computed beside
each other, in any order: a program goes back through its span with the state before every BT positions, which the
forward pass has kept, computes the states between in registers, and from them and the adjoint all gradients. The
state behind a block is the one kept before the next, which the program has just had.

## What was proved, and how

- **The arithmetic.** Triton's interpreter runs the very kernels on a CPU, in the tests, against the reference loop in
  float64: outputs, last state, all gradients; lengths 1 to 100, four regimes, ranks, packed and empty sequences, half
  precision.
- **The machine code.** Triton's compiler makes it without a card, for NVIDIA's Ampere (`sm_80`), Hopper (`sm_90`) and
  Blackwell (`sm_100`) and for AMD's CDNA 3 (`gfx942`): `python -m benchmarks.card_code` does so for every kernel and
  every configuration that autotuning may choose, and a test does it again for the flagship shape, N 32, P 4, rank 1.
  Stack is where spilled registers go. Right actions are listed for P 8 as well; at P 16 a split product's code has a
  stack (about 1.4 kB on `sm_90`), where the sine of a huge angle may work or registers may be spilled: that was not looked
  into, and its gradient at P 16 was not compiled.

"""
MODEL = """
## What is predicted

From the instructions of the compiled loops, the registers and shared memory above, and the published rates of three
cards, `python -m benchmarks.card` predicts the time of a pass: the largest of what each resource needs. *memory*:
bytes that must move over the card's bandwidth, kept states with them; *flight*: rounds over those that loads run
ahead, times the answer time of the memory; *issue*: instructions of the busiest scheduler, or the cycles of its units
for floats (two for an instruction of two numbers), or of the processor's shared memory, by the bytes that pass;
*order*: one warp's own instructions, each waiting for its operands and for the units.
It assumes that all of them overlap. The fraction is that of the memory roof: 1 is a pass that streams its operands and
results once at the card's full bandwidth. A pass forth and back streams more, since states are kept and the adjoint
reads some operands once more: {bound:.2f} is then as good as memory allows at the first shape. Where a few long
sequences are cut into segments, their summaries are counted, the prefix of these is not: it reads one map per segment.

"""
JUDGE = """
How far to trust it: the same kind of model, work over peak rate and bytes over bandwidth, for the CPU kernel beside
what the CPU did (`results/bench.json`).

"""
TAIL = """
## What is not known

Everything that only a run can tell: whether a card agrees with the interpreter bit for bit in rounding (it need not:
`exp2` and fused products differ), whether Blackwell's pairs of numbers do what they say, how far a lone warp falls
behind the model, what autotuning chooses. The model takes numbers that all lanes of a group read at once to pass
through shared memory once; if they passed once per lane, that would bind the gradients. The one command to find out, from a
source checkout on a machine with a card:

```text
shippo bench --device cuda
```

It holds each kernel against the float64 reference before it is timed, as on the CPU, and writes
`runs/bench-cuda.json`.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code_table(code: dict[str, Any]) -> str:
    """One line per kernel and configuration, one column per target: registers / stack / shared memory."""
    targets = list(dict.fromkeys(record["target"] for record in code["kernels"]))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for record in code["kernels"]:
        sizes = ", ".join(f"{name} {record[name]}" for name in ("BG", "BT", "STAGES", "BM", "warps") if name in record)
        line = found.setdefault((record["kernel"], sizes), {})
        line[record["target"]] = f"{record['registers']} / {record['stack']} / {record['shared']}"
    rows = [[kernel, sizes, *(line.get(target, "") for target in targets)] for (kernel, sizes), line in found.items()]
    title = f"Registers of a lane, bytes of stack and of shared memory, by Triton {code['triton']}, float32 unless said:\n\n"
    return title + table(["kernel", "configuration", *targets], rows)


def model_table(model: dict[str, Any]) -> str:
    rows = [
        [
            row["shape"],
            row["card"],
            {"forward": "forward", "both": "forward+backward"}[row["pass"]],
            str(row["segments"]),
            f"{1e6 * row['roof']:.0f}",
            f"{1e6 * row['seconds']:.0f}",
            f"{row['fraction']:.2f}",
            ", ".join(f"{part['kernel'].removeprefix('scan ')}: {part['binds']}" for part in row["parts"]),
        ]
        for row in model["predictions"]
    ]
    return table(["shape", "card", "pass", "segments", "roof, µs", "predicted, µs", "fraction", "what binds"], rows)


def cpu_table(model: dict[str, Any]) -> str:
    rows = [
        [row["pass"], *(f"{1e3 * row[name]:.1f}" for name in ("memory", "issue", "predicted", "measured"))]
        for row in model["cpu"]
    ]
    return table(["pass", "memory, ms", "issue, ms", "predicted, ms", "measured, ms"], rows)


def page(root: Path) -> str:
    code = json.loads((root / RESULT).read_text(encoding="utf-8"))
    model = code["model"]
    first = next(row for row in model["predictions"] if row["pass"] == "both")
    bound = first["roof"] / sum(part["terms"]["memory"] for part in first["parts"])
    return HEAD + code_table(code) + MODEL.format(bound=bound) + model_table(model) + JUDGE + cpu_table(model) + TAIL


def write(root: Path) -> None:
    (root / PAGE).write_text(page(root), encoding="utf-8")
