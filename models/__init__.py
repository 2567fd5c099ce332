"""The default policy of a model, and the families of models with layers that stay in high precision besides."""

if __name__ != "fp8graph.models":
    raise ImportError(f"import fp8graph.models, not {__name__}")

from fp8graph.models.general import FAMILIES, Family, extended, general_policy, policy_for, policy_of

__all__ = ["FAMILIES", "Family", "extended", "general_policy", "policy_for", "policy_of"]
