"""The ``fp8graph`` command: demo, explain, export, inspect, doctor and bench.

Exit codes: 0 success, 1 failure, 2 cannot run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8graph.version import __version__

# package -> extra of ours
_EXTRAS = {
    "rich": "demo",
    "matplotlib": "demo",
    "plotext": "demo",
    "transformers": "hf",
    "safetensors": "checkpoints",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    from fp8graph.errors import Fp8GraphError  # torch is imported only once the arguments are right

    try:
        return options.run(options)
    except Fp8GraphError as error:
        print(f"fp8graph: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        print(f'fp8graph: {error.name} is missing. Run: pip install "fp8graph[{_EXTRAS[error.name]}]"', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfp8graph: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8graph", description="FP8 for unmodified PyTorch models.")
    parser.add_argument("--version", action="version", version=f"fp8graph {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small Llama in bf16 and in FP8 and compare them")
    demo.add_argument("--steps", type=_positive, default=150, help="training steps of each run (default 150)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--recipe", default="tensorwise", help="the FP8 recipe (default tensorwise)")
    demo.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    demo.add_argument("--out", type=Path, default=Path("fp8graph-demo"), help="folder for the plot")
    demo.set_defaults(run=_demo)

    explain = commands.add_parser("explain", help="show what would be rewritten in a Hugging Face model, and why not")
    explain.add_argument("model", help="a config.json, a folder that holds one, or a model type like 'llama'")
    explain.add_argument(
        "--class", dest="name", metavar="NAME", help="a class of transformers, like AutoModelForSequenceClassification"
    )
    explain.add_argument("--layers", type=_positive, help="layers per stack (default: all of a config, 2 of a type)")
    explain.add_argument("--policy", help="a policy file (.toml or .json)")
    explain.add_argument("--recipe", help="the recipe of the default policy")
    explain.add_argument("--target", help="the hardware to decide for: cpu, sm_90, sm_100, gfx942, ...")
    explain.add_argument("--inference", action="store_true", help="forward only")
    explain.add_argument("--batch", type=_positive, default=1)
    explain.add_argument("--seq", type=_positive, default=128, help="tokens per sequence (default 128)")
    explain.add_argument(
        "--mesh",
        nargs="+",
        metavar="dp=,fsdp=,tp=,sp",
        help="predict a training step on a mesh of GPUs instead: replicas (DDP), shards (FSDP2), tensor and "
        "sequence parallelism; --batch and --seq are those of one replica, the default target is sm_90",
    )
    printed = explain.add_mutually_exclusive_group()
    printed.add_argument("--graph", metavar="STAGE", help="print the graph: before, after, or the name of a pass")
    printed.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.add_argument("--html", type=Path, help="write the report as an HTML page too")
    explain.set_defaults(run=_explain)

    export = commands.add_parser(
        "export", help="quantize a checkpoint for an inference engine (of a trained model: fp8graph.export in Python)"
    )
    export.add_argument("source", type=Path, help="a folder with config.json and safetensors files in high precision")
    export.add_argument("folder", type=Path, help="the folder to write, which must not exist")
    export.add_argument("--recipe", default="blockwise", help="(default blockwise)")
    export.add_argument("--policy", type=Path, metavar="FILE", help="a policy file, in place of the default policy")
    export.add_argument("--format", default="auto", help="auto, fp8, compressed-tensors or modelopt (default auto)")
    export.add_argument("--overwrite", action="store_true", help="replace a checkpoint in the folder")
    export.set_defaults(run=_export)

    inspect = commands.add_parser(
        "inspect", help="show what is in an FP8 checkpoint: formats, layers, outliers, and what does not fit together"
    )
    inspect.add_argument("folder", type=Path, help="a folder with config.json and safetensors files")
    inspect.add_argument("--json", action="store_true", help="print all of it as JSON, with a row per layer")
    inspect.set_defaults(run=_inspect)

    doctor = commands.add_parser("doctor", help="show what is native, emulated or missing on this machine")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench", help="measure what FP8 gains on this GPU, and compare with the speed model's prediction"
    )
    bench.add_argument("--recipe", nargs="+", default=["tensorwise", "rowwise"], help="(default tensorwise rowwise)")
    bench.add_argument(
        "--calibrate", type=Path, metavar="FILE.json", help="measure the speed model's rates instead, for target=FILE"
    )
    bench.set_defaults(run=_bench)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _demo(options: argparse.Namespace) -> int:
    from fp8graph.tools.demo import run_demo

    return run_demo(
        steps=options.steps,
        seed=options.seed,
        recipe=options.recipe,
        compiler=options.compiler,
        out=options.out,
    )


def _explain(options: argparse.Namespace) -> int:
    from fp8graph.backend import Backend
    from fp8graph.errors import ConfigError

    if options.mesh is not None:
        return _plan(options)
    settings = {"policy": options.policy, "recipe": options.recipe, "target": options.target}
    Backend(**settings)  # raises for one that cannot be used, before a model is built
    training = not options.inference
    model, inputs = _meta_model(options, training=training)
    report = _traced(model, inputs, training=training, **settings)
    if options.html is not None:
        report.to_html(options.html)
        print(f"fp8graph: wrote {options.html}", file=sys.stderr)
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
    elif options.graph is not None:
        for view in report.graphs:
            stages = {"before": view.before, "after": view.after, **view.stages}
            if options.graph not in stages:
                raise ConfigError(f"no stage {options.graph!r}. Stages: {', '.join(stages)}.")
            print(f"# {view.name}\n{stages[options.graph]}")
    elif options.html is None:
        print(report)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from fp8graph import hardware
    from fp8graph.backend import Backend
    from fp8graph.errors import ConfigError
    from fp8graph.planning import step_cost, workload
    from fp8graph.planning.mesh import Mesh, Network

    if options.inference or options.html is not None or options.graph is not None:
        raise ConfigError("--mesh predicts a training step: it cannot be combined with --inference, --html or --graph.")
    meshes, target = [Mesh.parse(text) for text in options.mesh], options.target or "sm_90"
    device, network = hardware.from_target(target), Network.of_target(target)
    recipes = None if options.recipe is None else (options.recipe,)
    settings: dict[str, Any] = {"policy": options.policy, "recipe": options.recipe, "target": target}
    Backend(**settings)
    model, inputs = _meta_model(options, training=True)
    if not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        raise ConfigError(f"--mesh predicts causal language models, and {type(model).__name__} is none.")
    report = _traced(model, inputs, training=True, **settings)
    work = workload.of_model(model, report, options.seq)
    plans = [step_cost.plan(work, mesh, hardware=device, network=network, recipes=recipes) for mesh in meshes]
    print(json.dumps([plan.to_dict() for plan in plans], indent=1) if options.json else "\n\n".join(map(str, plans)))
    return 0


def _meta_model(options: argparse.Namespace, *, training: bool) -> tuple[Any, dict[str, Any]]:
    """The model that was asked for, without weights, and inputs for it. Says what was left out."""
    from fp8graph.tools.from_config import config_of, inputs_of, model_of

    config, cut = config_of(options.model, options.layers)
    model = model_of(config, options.name)
    inputs, left_out = inputs_of(model, options.batch, options.seq, training=training)
    print(f"fp8graph: {', '.join(filter(None, (type(model).__name__, left_out, cut)))}", file=sys.stderr)
    return model, inputs


def _traced(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    from fp8graph.errors import ConfigError, Fp8GraphError
    from fp8graph.tools.explain import explain

    try:
        return explain(model, **settings, **inputs)
    except Fp8GraphError:
        raise
    except Exception as error:  # made-up inputs may not be what the model takes, and its code says anything then
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise ConfigError(
            f"cannot trace {type(model).__name__} with inputs made from its config ({reason}). "
            "Call fp8graph.explain(model, ...) with inputs of your own."
        ) from error


def _export(options: argparse.Namespace) -> int:
    from fp8graph.tools import inspect_checkpoint
    from fp8graph.tools.export_folder import export_folder

    settings = {name: getattr(options, name) for name in ("recipe", "policy", "format", "overwrite")}
    folder = export_folder(options.source, options.folder, **settings)
    print(inspect_checkpoint.text(inspect_checkpoint.inspected(folder)))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from fp8graph.tools import inspect_checkpoint

    found = inspect_checkpoint.inspected(options.folder)
    print(json.dumps(found.to_dict(), indent=1) if options.json else inspect_checkpoint.text(found))
    return 1 if found.problems else 0


def _bench(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from fp8graph import hardware
    from fp8graph.errors import ConfigError
    from fp8graph.recipes import resolve_recipe
    from fp8graph.tools import bench

    for recipe in options.recipe:
        resolve_recipe(recipe)
    if options.calibrate is not None and options.calibrate.suffix != ".json":
        raise ConfigError(f"{options.calibrate}: a calibration file must end in .json.")
    device = bench.fp8_gpu()
    found = hardware.of_device(device)
    if options.calibrate is not None:
        for done in bench.calibrate(device, found):
            bench.write(options.calibrate, found, done)  # at once: the next measurement may end this process
            print(bench.describe(done, found), flush=True)
        print(f'wrote {options.calibrate}: Backend(target="{options.calibrate}")')
        return 0
    table = Table(title="one linear, forward and backward: FP8 compared with bf16 under torch.compile")
    for column in ("tokens x in -> out", "recipe", "bf16 ms", "FP8 ms", "speedup", "predicted"):
        table.add_column(column, justify="right")
    for r in bench.linears(device, options.recipe):
        shape = f"{r.tokens} x {r.inputs} -> {r.outputs}"
        numbers = (r.bf16_ms, r.fp8_ms, r.speedup, r.predicted)
        table.add_row(shape, r.recipe, *(f"{number:.3f}" for number in numbers))
    Console().print(table)
    return 0


def _doctor(_options: argparse.Namespace) -> int:
    from fp8graph.report.tables import aligned
    from fp8graph.tools import doctor

    print("\n".join(aligned(doctor.machine())))
    print("\nbf16 linears and experts (grouped matmuls). Recipes that are not native are emulated:\n")
    print("\n".join(aligned(doctor.architectures())))
    return 0
