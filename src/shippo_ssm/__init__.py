"""SHiPPO: transported recurrent memory, H_t = L_t H_{t-1} R_t + U_t."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shippo_ssm.layers import Bidirectional as Bidirectional
    from shippo_ssm.layers import Shippo as Shippo
    from shippo_ssm.layers import ShippoBackbone as ShippoBackbone
    from shippo_ssm.layers import warmup as warmup
    from shippo_ssm.scan import block_affine_scan as block_affine_scan
    from shippo_ssm.scan import transport_scan as transport_scan

# Public name -> its package, loaded on first use, so that `import shippo_ssm` stays cheap.
_EXPORTS = {"Bidirectional": "layers", "Shippo": "layers", "ShippoBackbone": "layers"}
_EXPORTS |= {"transport_scan": "scan", "block_affine_scan": "scan", "warmup": "layers"}
__all__ = ["Bidirectional", "Shippo", "ShippoBackbone", "__version__", "block_affine_scan", "transport_scan", "warmup"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"shippo_ssm.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'shippo_ssm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
