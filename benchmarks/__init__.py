"""Peers and limits, side by side: how fast this project is, against what, and how far from what the machine allows.

Data path: `run.main` starts one child process per section and thread count (`child.py`). A section (`scan.py`, `sweeps.py`,
`expm.py`, `memory.py`, `models.py`, `projection.py`) prepares its inputs, holds every result against the float64 reference
(`gate.py`), and only then times ours and theirs in turn (`timer.py`); the machine's own bandwidth and FMA rate (`machine.py`)
make the roof (`roof.py`). The dictionaries of all sections make one JSON file, from which `verdict.py` draws the table of
the targets and `report.py` the performance page and its figure.
"""
