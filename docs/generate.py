"""Write everything that is generated: the regions of the pages, the figures and the notebook.

Run it after a change of `results/` or of the code that a page describes. `tests/test_docs.py` compares the pages with it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs import figures, notebook
from docs.fill import ROOT, fill, pages
from shippo_lab.experiments import names

if __name__ == "__main__":
    figures.draw(ROOT)
    for name in names():
        path = ROOT / "docs" / "results" / f"{name}.md"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"<!-- generated: results page {name} -->\n<!-- end -->\n", encoding="utf-8")
    for page in pages():
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    notebook.write(ROOT)
