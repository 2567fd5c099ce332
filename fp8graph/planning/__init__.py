"""What a training step costs on many GPUs, before anything is compiled."""

from fp8graph.planning.mesh import Mesh, Network
from fp8graph.planning.step_cost import Plan, Step, plan
from fp8graph.planning.workload import Linear, Workload, of_model

__all__ = ["Linear", "Mesh", "Network", "Plan", "Step", "Workload", "of_model", "plan"]
