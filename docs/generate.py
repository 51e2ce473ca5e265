"""Write the generated pages again: results and pictures from `results/`, the architecture from the code, and so on."""

from pathlib import Path

import architecture
import beside
import ceilings
import decoding
import front
import gpu
import larger
import notebook
import tracking
import turning
import works_with

from shippo_ssm.experiments import all_experiments
from shippo_ssm.lab.pages import Pages

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    Pages(root, all_experiments()).write()
    architecture.write(root)
    works_with.write(root)
    gpu.write(root)
    larger.write(root)
    turning.write(root)
    decoding.write(root)
    beside.write(root)
    ceilings.write(root)
    tracking.write(root)
    notebook.write(root)
    front.write(root)
