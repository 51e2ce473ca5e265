"""From Python to machine code: kernels compiled on first use and kept on disk, vector instructions, threads.

builder + constants, record of operands --launch--> machine code on all threads
"""

from shippo_ssm.engine.blocks import LANES, block_reader, block_writer, transposed
from shippo_ssm.engine.cache import cache_directory
from shippo_ssm.engine.emitter import Emitter, Pointer, Variable, register_lanes, simd, simd_lanes, tile_columns
from shippo_ssm.engine.gpu import Config, launch_gpu
from shippo_ssm.engine.memory import recycled
from shippo_ssm.engine.run import allocate, custom_op, differentiate, launch, save_tensors

__all__ = [
    "LANES",
    "Config",
    "Emitter",
    "Pointer",
    "Variable",
    "allocate",
    "block_reader",
    "block_writer",
    "cache_directory",
    "custom_op",
    "differentiate",
    "launch",
    "launch_gpu",
    "recycled",
    "register_lanes",
    "save_tensors",
    "simd",
    "simd_lanes",
    "tile_columns",
    "transposed",
]
