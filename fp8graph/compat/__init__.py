"""Everything that depends on a version, a defect or a private name of torch, by subsystem, each with the reason.

tests/compat/ says when an entry can go.
"""
