"""What the memory means: measures, transport paths and projection memories, in NumPy and SciPy float64.

A `Measure` says which part of the past is remembered and in which basis, a `Transport` how the channel frame moves, and a
`ProjectionMemory` puts both together: `project` (the approximation problem), `evolve` (the same answer online), `reconstruct`.
"""

from shippo_ssm.projection.basis_path import BasisPath
from shippo_ssm.projection.measures import Closure, Fourier, LagT, LegS, LegT, Measure
from shippo_ssm.projection.memory import ProjectionMemory
from shippo_ssm.projection.metric_only import MetricOnly
from shippo_ssm.projection.signals import Samples
from shippo_ssm.projection.stepping import ORDERS
from shippo_ssm.projection.transport import Transport

__all__ = [
    "ORDERS",
    "BasisPath",
    "Closure",
    "Fourier",
    "LagT",
    "LegS",
    "LegT",
    "Measure",
    "MetricOnly",
    "ProjectionMemory",
    "Samples",
    "Transport",
]
