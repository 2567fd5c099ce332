"""The cost of a training step on many GPUs, predicted before anything is compiled."""

from fp8graph.extras.planning.step_cost import Network, Plan, Step, plan
from fp8graph.extras.planning.workload import Linear, Mesh, Workload, of_model

__all__ = ["Linear", "Mesh", "Network", "Plan", "Step", "Workload", "of_model", "plan"]
