"""Every statement of the paper as an executable check with its residual; `verify` runs them all.

`operator` holds section 2 and appendix A, `frames` appendix B, `scanning` sections 3.2 and 3.3 with appendices C.1 to
C.3, `cell` section 3.4 with appendices C.4 to C.7. Each check is a function named after its statement that returns a
`CheckResult`; `CHECKS` has them by name, in the order of the paper."""

from shippo_lab.theory import operator, frames, scanning, cell  # noqa: I001  (the order of the paper)
from shippo_lab.theory.registry import CHECKS, CheckResult, run_check, verify

__all__ = ["CHECKS", "CheckResult", "cell", "frames", "operator", "run_check", "scanning", "verify"]
