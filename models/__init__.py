"""Model families: what each keeps in high precision and why, a tiny config, and the counts to expect."""

if __name__ != "fp8graph.models":
    raise ImportError(f"import fp8graph.models, not {__name__}")

import pkgutil
from importlib import import_module

from fp8graph.models.family import Family
from fp8graph.models.general import general_policy, policy_for, policy_of

# every other file here is a family's
FAMILIES: dict[str, Family] = {
    found.name: import_module(f"{__name__}.{found.name}").FAMILY
    for found in pkgutil.iter_modules(__path__)
    if found.name not in ("family", "general")
}

__all__ = ["FAMILIES", "Family", "general_policy", "policy_for", "policy_of"]
