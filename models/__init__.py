"""Model families: the layers that each keeps in high precision and why, a tiny config, and the counts to expect."""

if __name__ != "fp8graph.models":
    raise ImportError(f"import fp8graph.models, not {__name__}")

from fp8graph.models.families import FAMILIES
from fp8graph.models.family import Family
from fp8graph.models.general import extended, general_policy, policy_for, policy_of

__all__ = ["FAMILIES", "Family", "extended", "general_policy", "policy_for", "policy_of"]
