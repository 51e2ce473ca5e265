"""Write `docs/results.md`, the table in the README and the pictures in `docs/_static` again, from the committed results."""

from pathlib import Path

from shippo_ssm.experiments import all_experiments
from shippo_ssm.lab.pages import Pages

if __name__ == "__main__":
    Pages(Path(__file__).resolve().parents[1], all_experiments()).write()
