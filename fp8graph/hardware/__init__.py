"""Devices: what they multiply, and how fast."""

from fp8graph.hardware.devices import Hardware, alignment, default_recipe, from_target, of_device, of_machine

__all__ = ["Hardware", "alignment", "default_recipe", "from_target", "of_device", "of_machine"]
