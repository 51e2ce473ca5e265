"""H_t = L_t H_{t-1} R_t + U_t: the algebra, the reference loop, and the fast ways (paper section 3.2)."""

from shippo_ssm.scan.algebra import Affine, Recurrence, apply, compose, identity_affine
from shippo_ssm.scan.api import BACKENDS, block_affine_scan, resolve_backend, scan, transport_scan
from shippo_ssm.scan.associative import cumulative_affine

__all__ = [
    "BACKENDS",
    "Affine",
    "Recurrence",
    "apply",
    "block_affine_scan",
    "compose",
    "cumulative_affine",
    "identity_affine",
    "resolve_backend",
    "scan",
    "transport_scan",
]
