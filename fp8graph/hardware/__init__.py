"""Devices: the low-precision GEMMs that they have, how torch calls them, and how fast they are."""

from fp8graph.hardware.device import Hardware
from fp8graph.hardware.devices import (
    EXAMPLES,
    from_target,
    multiplies_groups,
    of_device,
    of_machine,
    scaled_attention,
    scaled_grouped_mm,
    scaled_mm,
)

__all__ = [
    "EXAMPLES",
    "Hardware",
    "from_target",
    "multiplies_groups",
    "of_device",
    "of_machine",
    "scaled_attention",
    "scaled_grouped_mm",
    "scaled_mm",
]
