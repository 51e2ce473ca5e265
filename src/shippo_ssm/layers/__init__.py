"""Layers: what a mixer is, the two-point cell, the Shippo layer, lifts, blocks, interventions (paper section 3)."""

from shippo_ssm.layers.attention import AttentionCache, CausalAttention
from shippo_ssm.layers.block import Bidirectional, Block, ShippoBackbone, Stack
from shippo_ssm.layers.cell import shippo_cell, shippo_cell_step
from shippo_ssm.layers.controller import Controller, Emission
from shippo_ssm.layers.interventions import debug_nans, identity_right, zero_right_suffix
from shippo_ssm.layers.lift import LiftedMemory, LiftState, OnlineMemory, lift, online_memory
from shippo_ssm.layers.mixer import Mixer, Segment
from shippo_ssm.layers.rows import ShortConv
from shippo_ssm.layers.shippo import Shippo, warmup
from shippo_ssm.layers.spec import PAPER_GEOMETRY, PAPER_START, PRESETS, ShippoSpec
from shippo_ssm.layers.states import CellState, ShippoState
from shippo_ssm.layers.streaming import StreamingLayer
from shippo_ssm.layers.weight_decay import weight_decay_groups

__all__ = [
    "PAPER_GEOMETRY", "PAPER_START", "PRESETS", "AttentionCache", "Bidirectional", "Block", "CausalAttention",
    "CellState", "Controller", "Emission", "LiftState", "LiftedMemory", "Mixer", "OnlineMemory", "Segment", "Shippo",
    "ShippoBackbone", "ShippoSpec", "ShippoState", "ShortConv", "Stack", "StreamingLayer", "debug_nans",
    "identity_right", "lift", "online_memory", "shippo_cell", "shippo_cell_step", "warmup", "weight_decay_groups",
    "zero_right_suffix",
]  # fmt: skip
