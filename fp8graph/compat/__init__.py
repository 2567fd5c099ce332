"""All code that depends on a version, a defect or a private name of torch, by subsystem and with the reason.

tests/compat/ shows when an entry can be removed.
"""
