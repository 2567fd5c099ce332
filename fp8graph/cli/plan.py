"""``fp8graph plan``: predict a training step on many GPUs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fp8graph.cli.arguments import add_model, add_policy, check_recipe, command, meta_model, traced


def add(commands: Any) -> None:
    """What the command takes."""
    plan = command(commands, "plan", run, "predict a training step of a Hugging Face model on a mesh of GPUs")
    add_model(plan)
    add_policy(plan)
    plan.add_argument(
        "--mesh",
        nargs="+",
        required=True,
        metavar="dp=,fsdp=,tp=,sp",
        help="one or more: replicas (DDP), shards (FSDP2), tensor and sequence parallelism",
    )
    plan.add_argument("--json", action="store_true", help="print the predictions as JSON")


def run(options: argparse.Namespace) -> int:
    """Predict each mesh under each recipe."""
    check_recipe(options.recipe)
    from fp8graph import hardware
    from fp8graph.backend import Backend
    from fp8graph.errors import ConfigError
    from fp8graph.planning import step_cost, workload
    from fp8graph.planning.mesh import Mesh, Network

    meshes, target = [Mesh.parse(text) for text in options.mesh], options.target or "sm_90"
    device, network = hardware.from_target(target), Network.of_target(target)
    recipes = None if options.recipe is None else (options.recipe,)
    settings: dict[str, Any] = {"policy": options.policy, "recipe": options.recipe, "target": target}
    Backend(**settings)
    model, inputs = meta_model(options, training=True)
    if not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        raise ConfigError(f"plan predicts causal language models, and {type(model).__name__} is none.")
    report = traced(model, inputs, training=True, **settings)
    work = workload.of_model(model, report, options.seq)
    plans = [step_cost.plan(work, mesh, hardware=device, network=network, recipes=recipes) for mesh in meshes]
    print(json.dumps([plan.to_dict() for plan in plans], indent=1) if options.json else "\n\n".join(map(str, plans)))
    return 0
