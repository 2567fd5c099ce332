"""The cost of a training step on many GPUs, predicted before anything is compiled."""

from fp8graph.planning.mesh import Mesh, Network
from fp8graph.planning.step_cost import Plan, Step, plan
from fp8graph.planning.workload import Linear, Workload, of_model

__all__ = ["Linear", "Mesh", "Network", "Plan", "Step", "Workload", "of_model", "plan"]
