"""The scales of low-precision products, followed through a graph: ``flow.faults``."""
