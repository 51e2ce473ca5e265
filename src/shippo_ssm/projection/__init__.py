"""What the memory means: measures, transport paths and projection memories, in NumPy and SciPy float64.

A `Measure` says which part of the past is remembered and in which basis, a `Transport` how the channel frame moves, and a
`ProjectionMemory` combines both: `project` (the approximation problem), `evolve` (the same result online), `reconstruct`.
"""

from shippo_ssm.projection.measures import Fourier, LagT, LegS, LegT, Measure
from shippo_ssm.projection.memory import ORDERS, ProjectionMemory
from shippo_ssm.projection.signals import Samples
from shippo_ssm.projection.streaming import StreamingMemory
from shippo_ssm.projection.transport import Transport

__all__ = [
    "ORDERS", "Fourier", "LagT", "LegS", "LegT", "Measure", "ProjectionMemory", "Samples", "StreamingMemory",
    "Transport",
]  # fmt: skip
