"""The page "Beside Mamba", made from `results/beside-mamba.json`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

PAGE, RESULT = "docs/beside-mamba.md", "results/beside-mamba.json"
HEAD = """# Beside Mamba

One task, one budget, one width, four layers. After each element of a word, say the product so far: the elements are the
{order} turns of a cube (the group {group}), and the answer depends on the order of all that came before. Words of up to 16
elements are trained on, longer ones are asked for.

Every model is the same frame: embedding, one pre-norm block of width {width}, head. Only the layer in the block is another one:

```python
from shippo_ssm import Shippo

layer = Shippo({width}, d_state={d_state})  # the first row
layer = Shippo({width}, d_state={d_state}, right="none")  # the second
# MambaBlock(MambaConfig(d_model={width}, n_layers=1, d_state={d_state}))  # the third, from mambapy
# causal attention with rotary positions and an MLP  # the fourth
```

## Accuracy

Fraction of prefix products that are right, mean over {seeds}; {steps:,} steps of about 512 tokens each. Guessing is
{guess:.3f}.

"""
TAIL = """
![Accuracy against the length of the word](_static/front.svg)

A Mamba layer is a SHiPPO layer without right action in this respect: its state decays and is written to, and the decays
commute. It learns the shortest words by heart. More layers help on longer words; for a group that is not solvable, such as A5,
no fixed number of them does for all lengths, as far as is known of complexity (Merrill, Petty and Sabharwal, *The Illusion of
State in State-Space Models*, 2024), and attention has the same limit.

## Time

"""
LIMITS = """
## How far this goes

- Widths are equal, sizes are not: SHiPPO's controller emits more per group than Mamba's. Size is not what decides here, since
  the second row has nearly all weights of the first and none of its accuracy.
- The budget was set by the group: on A5, with 60 elements, a first try of 2,000 steps (one seed) did not get SHiPPO past 0.14
  at length 16; the experiment `words` gives it 4,500.
- It is the task that right actions are for. On text, where little has to be multiplied, they are worth much less: the
  experiment `start` has such a probe ({doc}`results`).
- The recipe (AdamW at 3e-3, short words first) was chosen for SHiPPO, on another group; Mamba starts as mambapy has it, with
  its steps of 0.001 to 0.1. Nobody searched for a better recipe for the others. The experiment `words` has a GRU and an LSTM.
- Mamba's own kernels are for CUDA. On a CPU there are mambapy, measured here, and the slow path of Transformers, which is
  slower ({doc}`performance`).

```bash
python -m benchmarks.beside_mamba
python -m benchmarks.beside_mamba --time
```

writes `results/beside-mamba.json`; `pip install mambapy` first (extra `bench`).
"""


def page(root: Path) -> str:
    """docs/beside-mamba.md."""
    result = json.loads((root / RESULT).read_text(encoding="utf-8"))
    runs, lengths = result["runs"], result["lengths"]
    count = min(map(len, runs.values()))
    seeds = "one seed" if count == 1 else f"{count} seeds"
    text = HEAD.format(order=24, guess=1 / 24, seeds=seeds, **result)
    text += f"| layer | parameters | {' | '.join(f'length {n}' for n in lengths)} |\n|{'---|' * (len(lengths) + 2)}\n"
    for name, found in runs.items():
        values = [f"{mean(run['accuracy'][str(n)] for run in found):.3f}" for n in lengths]
        text += f"| {name} | {found[0]['parameters']:,} | {' | '.join(values)} |\n"
    text += TAIL
    if "time" not in result:
        return text + "Not measured; `python -m benchmarks.beside_mamba --time` does it.\n" + LIMITS
    found, tokens = result["time"]["milliseconds"], result["time"]["tokens"]
    text += f"Milliseconds of a training step (forward and backward) of {tokens:,} tokens, taken in turn, medians.\n\n"
    text += "| layer | words of 16 | words of 512 |\n|---|---|---|\n"
    text += "".join(f"| {name} | {times['16']:.1f} | {times['512']:.1f} |\n" for name, times in found.items())
    return text + f"\n{result['time']['machine']}.\n" + LIMITS


def write(root: Path) -> None:
    """The page, in the checkout `root`."""
    (root / PAGE).write_text(page(root), encoding="utf-8")
