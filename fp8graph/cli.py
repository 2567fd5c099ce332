"""The ``fp8graph`` command: ``COMMANDS`` says what each command takes, and a function of its name runs it.

Exit codes: 0 success, 1 failure, 2 cannot run, 130 interrupted. Help imports neither torch nor rich: a command imports
what it needs, and checks its arguments before that.
"""

from __future__ import annotations

import argparse
import bisect
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from fp8graph import words
from fp8graph.version import __version__
from fp8graph.words.extras import EXTRAS, install

SEQ: Final = 128  # tokens of a sequence of a model that is explained, if nobody says


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except ModuleNotFoundError as error:
        if (command := install(error.name or "")) is None:
            raise
        print(f"fp8graph: {error.name} is missing. Run: {command}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfp8graph: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fp8graph explain llama | head`
        sys.stderr.close()
        return 1
    except Exception as error:
        from fp8graph.errors import Fp8GraphError  # imports torch, which some commands do without

        if not isinstance(error, Fp8GraphError | OSError):  # OSError: a file that cannot be read or written
            raise
        print(f"fp8graph: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Names what was probably meant by a command or a choice that there is not: ``argparse`` of Python 3.14 can."""

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += "." + words.did_you_mean(match[1], re.findall(r"[\w-]+", match[2]))
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Return all commands and what they take."""
    main_parser = _Parser(prog="fp8graph", description="FP8 for unmodified PyTorch models.")
    main_parser.add_argument("--version", action="version", version=f"fp8graph {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add(commands, command)
    return main_parser


def _add(commands: Any, command: Command) -> None:
    """Add the parser of a command, and those of the commands in it."""
    about = command.about
    one = commands.add_parser(command.name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    one.set_defaults(run=command.run)
    alternatives = one.add_mutually_exclusive_group() if command.alternatives else one
    for name, settings in command.arguments.items():
        (alternatives if name in command.alternatives else one).add_argument(name, **settings)
    if command.commands:
        inner = one.add_subparsers(metavar="COMMAND")
        for each in command.commands:
            _add(inner, each)


def demo(options: argparse.Namespace) -> int:
    """Train the same small Llama twice."""
    started = time.monotonic()  # importing torch counts
    from fp8graph.tools.demo import run_demo

    settings = {name: getattr(options, name) for name in ("steps", "seed", "recipe", "compiler", "out")}
    return run_demo(**settings, started=started)


def explain(options: argparse.Namespace) -> int:
    """Trace the model on the meta device, and print the report."""
    from fp8graph.backend.backend import Backend

    if options.html is not None:
        _check_writable(options.html)
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
        print(_stage(report, options.graph))
    elif options.table or (options.html is None and not _has_rich()):
        print(report)
    elif options.html is None:
        from fp8graph.report.tree import print_tree

        print_tree(report, type(model).__name__)
    too_slow = not any(gemm.recipe for gemm in report.gemms) and any(gemm.by_profitability for gemm in report.gemms)
    if too_slow and options.batch is options.seq is None and not (options.json or options.graph):
        print(f"fp8graph: {_faster_from(options, training=training, **settings)}", file=sys.stderr)
    return 0


def _faster_from(options: argparse.Namespace, **settings: Any) -> str:
    """Return a sentence about the fewest tokens with which some GEMM is faster in FP8, by two layers of the model."""
    from fp8graph.tools.hugging_face import config_of, inputs_of, model_of

    model = model_of(config_of(options.model, min(options.layers or 2, 2))[0], options.name)

    def inputs(batch: int) -> dict[str, Any]:
        return inputs_of(model, batch, SEQ, training=settings["training"])[0]

    def is_faster(batch: int) -> bool:
        return any(gemm.recipe for gemm in _traced(model, inputs(batch), **settings).gemms)

    place = bisect.bisect_left(batches := [2**power for power in range(1, 8)], True, key=is_faster)
    sizes = [_size(inputs(batch), batch, SEQ) for batch in (1, *batches)]
    slow = f"no GEMM is faster in FP8 with {sizes[0]}"
    if place == len(batches):
        return f"{slow}, nor with {sizes[-1]}."
    return f"{slow}. From {sizes[place + 1]} on, some are: --batch {batches[place]}."


def _size(inputs: dict[str, Any], batch: int, seq: int) -> str:
    """Return the size of made-up inputs, of which those of images have no tokens."""
    of_tokens = {"input_ids", "decoder_input_ids", "input_values"} & inputs.keys()
    return f"{batch} x {seq} tokens" if of_tokens else f"a batch of {batch}"


def _stage(report: Any, name: str) -> str:
    """Give the text of one stage of each graph: after a pass, or after the last one before it that the graph needed."""
    from fp8graph.errors import ConfigError, did_you_mean
    from fp8graph.passes import JOINT_PIPELINE

    passes = [each.name for each in JOINT_PIPELINE]
    if name not in (stages := ["before", "after", *passes]):
        here = [stage for stage in stages if stage not in passes or any(stage in view.stages for view in report.graphs)]
        raise ConfigError(f"no stage {name!r}.{did_you_mean(name, stages)} Stages here: {', '.join(here)}.")
    texts: list[str] = []
    for view in report.graphs:
        text = view.after if name == "after" else view.before
        for stage in passes[: passes.index(name) + 1] if name in passes else ():
            text = view.stages.get(stage, text)
        texts.append(f"# {view.name}\n{text}")
    return "\n".join(texts)


def _has_rich() -> bool:
    if importlib.util.find_spec("rich") is not None:
        return True
    print(f"fp8graph: rich is missing: a table in place of the tree of layers. Run: {install('rich')}", file=sys.stderr)
    return False


def plan(options: argparse.Namespace) -> int:
    """Predict each mesh under each recipe."""
    from fp8graph import hardware
    from fp8graph.backend.backend import Backend
    from fp8graph.errors import ConfigError
    from fp8graph.extras import planning

    meshes, target = [planning.Mesh.parse(text) for text in options.mesh], options.target or "sm_90"
    device, network = (
        hardware.from_target(target),
        planning.Network.of_target(target, max(mesh.gpus for mesh in meshes)),
    )
    recipes = None if options.recipe is None else (options.recipe,)
    settings: dict[str, Any] = {"policy": options.policy, "recipe": options.recipe, "target": target}
    Backend(**settings)
    model, inputs = _meta_model(options, training=True)
    if not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        raise ConfigError(f"plan predicts causal language models, and {type(model).__name__} is not one.")
    report = _traced(model, inputs, training=True, **settings)
    work = planning.of_model(model, report, options.seq or SEQ)
    plans = [planning.plan(work, mesh, hardware=device, network=network, recipes=recipes) for mesh in meshes]
    print(json.dumps([plan.to_dict() for plan in plans], indent=1) if options.json else "\n\n".join(map(str, plans)))
    return 0


def tune(options: argparse.Namespace) -> int:
    """Measure, print the scores, and write the policy."""
    from fp8graph.extras.planning.tune import tune
    from fp8graph.tools.hugging_face import batches_of, language_model

    _check_writable(options.out)
    if options.plot is not None:
        _check_writable(options.plot, ".png", ".svg", ".pdf")
    model, tokenizer = language_model(options.model)
    batches = batches_of(tokenizer, options.text, options.batches, options.batch, options.seq, options.seed)
    goal = {"budget": options.budget} if options.min_speedup is None else {"min_speedup": options.min_speedup}
    settings = {name: getattr(options, name) for name in ("target", "seed", "resume")}
    device = next(model.parameters()).device
    inputs = [{"input_ids": tokens.to(device), "labels": tokens.to(device), "use_cache": False} for tokens in batches]
    result = tune(model, inputs, recipes=options.recipe, **settings, **goal)
    print(result)
    result.save(options.out)
    print(f"fp8graph: wrote {options.out}", file=sys.stderr)
    if options.plot is not None:
        result.plot(options.plot)
        print(f"fp8graph: wrote {options.plot}", file=sys.stderr)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the folder, and show what is in it."""
    from fp8graph.errors import ConfigError

    if not options.overwrite and options.folder.is_dir() and any(options.folder.iterdir()):
        raise ConfigError(f"{options.folder}: exists. Choose another folder, or pass --overwrite to replace it.")
    from fp8graph.tools import inspect_checkpoint
    from fp8graph.tools.export import export_folder

    settings = {name: getattr(options, name) for name in ("recipe", "policy", "format", "overwrite")}
    folder = export_folder(options.source, options.folder, **settings)
    print(inspect_checkpoint.text(inspect_checkpoint.inspected(folder)))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Read one layer at a time; 1 if something does not fit together."""
    from fp8graph.tools import inspect_checkpoint

    inspection = inspect_checkpoint.inspected(options.folder)
    print(json.dumps(inspection.to_dict(), indent=1) if options.json else inspect_checkpoint.text(inspection))
    return 1 if inspection.problems else 0


def lint(options: argparse.Namespace) -> int:
    """Judge a checkpoint, one layer at a time; 1 if something is wrong."""
    from fp8graph.tools.lint_checkpoint import linted

    result = linted(options.folder)
    print(json.dumps(result.to_dict(), indent=1) if options.json else result)
    return 0 if result else 1


def doctor(_options: argparse.Namespace) -> int:
    """Print the machine, the packages that can be installed, and a table of recipes by architecture."""
    from fp8graph.report.tables import aligned
    from fp8graph.tools import doctor

    print("\n".join(aligned([*doctor.machine(), *missing()])))
    print("\nbf16 linears and experts (grouped matmuls). Recipes that are not native are emulated:\n")
    print("\n".join(aligned(doctor.architectures())))
    return 0


def missing() -> list[tuple[str, str]]:
    """Return each optional package that is not installed, and the command that installs it."""
    names = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    rows = [(name, f"not installed. Run: {install(name)}") for name in names]
    return rows or [("optional packages", "all installed")]


def bench(options: argparse.Namespace) -> int:
    """Measure linears, or the rates that predictions are made of."""
    from rich.console import Console
    from rich.table import Table

    from fp8graph import hardware
    from fp8graph.errors import ConfigError
    from fp8graph.tools import bench

    if options.calibrate is not None and options.calibrate.suffix != ".json":
        raise ConfigError(f"{options.calibrate}: a calibration file must end in .json.")
    device = bench.fp8_gpu()
    gpu = hardware.of_device(device)
    if options.calibrate is not None:
        for done in bench.calibrate(device, gpu):
            bench.write(options.calibrate, gpu, done)  # at once: the next measurement may end this process
            print(bench.describe(done, gpu), flush=True)
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


def record(options: argparse.Namespace) -> int:
    """Train whole models by each contender, and write one file."""
    from fp8graph.files import write_file
    from fp8graph.hardware import current_device
    from fp8graph.tools import bench
    from fp8graph.tools import record as records
    from fp8graph.tools.record import forms
    from fp8graph.tools.record.machine import refuse_changed_tree

    _check_writable(options.out, ".json")
    if not (options.any_tree or options.tiny):
        refuse_changed_tree()
    device = current_device() if options.tiny else bench.fp8_gpu()

    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"{row['model']}: {', '.join(filter(None, forms.cells(row, rows)))}", flush=True)

    written = records.record(
        options.out,
        device,
        models=options.model,
        contenders=options.only,
        steps=options.steps,
        is_tiny=options.tiny,
        show=show,
    )
    print("", *forms.tables(written["rows"]), sep="\n")
    name, text = forms.titan(written, options.entity)
    titan = options.out.with_name(name)
    write_file(titan, text, str(titan))
    print(
        f"wrote {options.out}: send it by a pull request that adds it to benchmarks/results/records/ of fp8graph's "
        f"repository; docs/records.md shows all of them.\n"
        f"wrote {titan}: the same in the form that torchtitan's benchmarks/ takes."
    )
    return 0 if any("step_s" in row for row in written["rows"]) else 1


def completion(options: argparse.Namespace) -> int:
    """Print the parser as shtab writes it for a shell."""
    shtab: Any = importlib.import_module("shtab")
    print(shtab.complete(parser(), shell=options.shell))
    return 0


def _positive(text: str) -> int:
    """Return a number of at least 1."""
    number = int(text) if re.fullmatch("[0-9]+", text) else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def _recipe(name: str) -> str:
    """Return the name of a recipe."""
    if why := words.why_no_recipe(name):
        raise argparse.ArgumentTypeError(why)
    return name


def _target(name: str) -> str:
    """Return the name of a device, or of a file with its speed, which is read later."""
    if not name.endswith(words.CALIBRATION) and (why := words.why_no_target(name)):
        raise argparse.ArgumentTypeError(why)
    return name


def _policy(name: str) -> Path:
    """Return a policy file, or a checkpoint that has one; it is read later."""
    if not (path := Path(name)).exists():
        meant = f". Did you mean --recipe {name}?" if name in words.RECIPE_NAMES else ""
        raise argparse.ArgumentTypeError(f"{name}: no such file or folder{meant}")
    return path


def _check_writable(path: Path, *endings: str) -> None:
    """Raise ConfigError, before any work is done, if a file cannot be written there."""
    from fp8graph.errors import ConfigError

    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written. Is there such a folder?")
    if endings and path.suffix not in endings:
        raise ConfigError(f"{path}: must end in {', '.join(endings)}.")


def _meta_model(options: argparse.Namespace, *, training: bool) -> tuple[Any, dict[str, Any]]:
    """Return the model of ``options``, without weights, and inputs for it. Says what was left out."""
    from fp8graph.tools.hugging_face import config_of, inputs_of, model_of

    config, cut = config_of(options.model, options.layers)
    model = model_of(config, options.name)
    batch, seq = options.batch or 1, options.seq or SEQ
    inputs, left_out = inputs_of(model, batch, seq, training=training)
    size = _size(inputs, batch, seq)
    others = "--batch and --seq change" if size.endswith("tokens") else "--batch changes"
    assumed = "" if options.seq else f"{size} assumed ({others} that)"
    print(f"fp8graph: {', '.join(filter(None, (type(model).__name__, assumed, left_out, cut)))}", file=sys.stderr)
    return model, inputs


def _traced(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    """Return the report of ``model`` on ``inputs`` that were made for it."""
    from fp8graph.errors import ConfigError, Fp8GraphError
    from fp8graph.report.terminal import working
    from fp8graph.tools.explain import InputsError, explain
    from fp8graph.tools.hugging_face import positions_of

    try:
        with working(f"tracing {type(model).__name__}"):
            return explain(model, **settings, **inputs)
    except Exception as error:  # made-up inputs may not be what the model takes, and its code says anything then
        if isinstance(error, Fp8GraphError) and not isinstance(error, InputsError):
            raise
        cause = error.__cause__ if isinstance(error, InputsError) and error.__cause__ is not None else error
        reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:200]}"
        positions, tokens = positions_of(model.config), inputs.get("input_ids")
        too_long = positions is not None and tokens is not None and tokens.shape[1] > positions
        raise ConfigError(
            f"cannot trace {type(model).__name__} with inputs made from its config ({reason}). "
            f"{f'Try --seq {positions}, or call' if too_long else 'Call'} fp8graph.explain(model, ...) with inputs of "
            "your own."
        ) from error


Arguments = dict[str, dict[str, Any]]  # by name: what argparse's add_argument takes


class Command(NamedTuple):
    """One command, whose name is that of the function that runs it."""

    run: Callable[[argparse.Namespace], int]
    about: str  # its line among all commands, too
    arguments: Arguments = {}
    alternatives: tuple[str, ...] = ()  # those of which one line has at most one
    commands: tuple[Command, ...] = ()  # `fp8graph bench record`

    @property
    def name(self) -> str:
        return self.run.__name__


# a model without weights, and the inputs that it is traced with
_MODEL: Final[Arguments] = {
    "model": dict(help="a config.json, a folder that holds one, or a model type like 'llama'"),
    "--class": dict(
        dest="name", metavar="NAME", help="a class of transformers, like AutoModelForSequenceClassification"
    ),
    "--layers": dict(type=_positive, help="layers per stack (default: all of a config, 2 of a type)"),
    "--batch": dict(type=_positive, help="sequences per replica (default 1)"),
    "--seq": dict(type=_positive, help=f"tokens per sequence (default {SEQ})"),
}
# decides about each GEMM
_POLICY: Final[Arguments] = {
    "--policy": dict(type=_policy, help="a policy file (.toml or .json)"),
    "--recipe": dict(type=_recipe, help="the recipe of the default policy"),
    "--target": dict(type=_target, help="the hardware to decide for: cpu, sm_90, sm_100, gfx942, ..."),
}
# in the order of their use: look, choose, write and read checkpoints, measure
COMMANDS: Final = (
    Command(
        demo,
        "train a small Llama in bf16 and in FP8 and compare them",
        {
            "--steps": dict(
                type=_positive, help="training steps of each run (default: 10 to 150, so that it ends in three minutes)"
            ),
            "--seed": dict(type=int, default=0),
            "--recipe": dict(type=_recipe, default="tensorwise", help="the FP8 recipe (default tensorwise)"),
            "--compiler": dict(
                choices=("inductor", "eager"), help="of FP8 (default: inductor, if there is time for it; else eager)"
            ),
            "--out": dict(type=Path, default=Path("fp8graph-demo"), help="folder for the plot"),
        },
    ),
    Command(
        explain,
        "show what would be rewritten in a Hugging Face model, and why not",
        {
            **_MODEL,
            **_POLICY,
            "--inference": dict(action="store_true", help="forward only"),
            "--table": dict(action="store_true", help="print a row per GEMM in place of the tree of layers"),
            "--graph": dict(metavar="STAGE", help="print the graph: before, after, or the name of a pass"),
            "--json": dict(action="store_true", help="print the report as JSON"),
            "--html": dict(type=Path, metavar="FILE", help="write the report as an HTML page too"),
        },
        alternatives=("--table", "--graph", "--json"),
    ),
    Command(
        plan,
        "predict a training step of a Hugging Face model on a mesh of GPUs",
        {
            **_MODEL,
            **_POLICY,
            "--mesh": dict(
                nargs="+",
                required=True,
                metavar="dp=,fsdp=,tp=,sp",
                help="one or more: replicas (DDP), shards (FSDP2), tensor and sequence parallelism; dp=1 for one GPU",
            ),
            "--json": dict(action="store_true", help="print the predictions as JSON"),
        },
    ),
    Command(
        tune,
        "choose a policy by measuring what FP8 changes in each layer of a model, on your text",
        {
            "model": dict(type=Path, help="a folder with a causal language model and its tokenizer"),
            "--text": dict(type=Path, nargs="+", required=True, metavar="FILE", help="text like what it trains on"),
            "--recipe": dict(type=_recipe, nargs="+", help="candidates (default: those that the target multiplies)"),
            "--target": dict(type=_target, help="the GPU to predict times for: sm_90, sm_100, ..."),
            "--budget": dict(
                type=float, default=0.5, help="share of the error that FP8 everywhere makes (default 0.5)"
            ),
            "--min-speedup": dict(type=float, help="the least error at which the GEMMs are this much faster"),
            "--batches": dict(type=_positive, default=8, help="batches that are measured (default 8)"),
            "--batch": dict(type=_positive, default=4, help="sequences per batch (default 4)"),
            "--seq": dict(type=_positive, default=512, help="tokens per sequence (default 512)"),
            "--seed": dict(type=int, default=0, help="of the places in the text (default 0)"),
            "--resume": dict(type=Path, metavar="FILE", help="keep what was measured there, and go on from it"),
            "--out": dict(type=Path, default=Path("policy.toml"), help="(default policy.toml)"),
            "--plot": dict(type=Path, metavar="FILE.png", help="draw error against time, too"),
        },
        alternatives=("--budget", "--min-speedup"),
    ),
    Command(
        export,
        "quantize a checkpoint for an inference engine (of a trained model: fp8graph.export in Python)",
        {
            "source": dict(type=Path, help="a folder with config.json and safetensors files in high precision"),
            "folder": dict(type=Path, help="the folder to write, which must not exist"),
            "--recipe": dict(type=_recipe, default="blockwise", help="(default blockwise)"),
            "--policy": dict(type=_policy, metavar="FILE", help="a policy file, in place of the default policy"),
            "--format": dict(default="auto", help="auto, fp8, compressed-tensors or modelopt (default auto)"),
            "--overwrite": dict(action="store_true", help="replace a checkpoint in the folder"),
        },
    ),
    Command(
        inspect,
        "show what is in an FP8 checkpoint: formats, layers, outliers, and what does not fit together",
        {
            "folder": dict(type=Path, help="a folder with config.json and safetensors files"),
            "--json": dict(action="store_true", help="print all of it as JSON, with a row per layer"),
        },
    ),
    Command(
        lint,
        "judge an FP8 checkpoint by what its numbers mean: scales, codes, the config's lists; 1 if something is wrong",
        {
            "folder": dict(type=Path, help="a folder with config.json and safetensors files"),
            "--json": dict(action="store_true", help="print the findings as JSON"),
        },
    ),
    Command(doctor, "show what is native, emulated or missing on this machine"),
    Command(
        bench,
        "measure what FP8 gains on this GPU, and compare with the speed model's prediction",
        {
            "--recipe": dict(
                type=_recipe, nargs="+", default=["tensorwise", "rowwise"], help="(default tensorwise rowwise)"
            ),
            "--calibrate": dict(
                type=Path, metavar="FILE.json", help="measure the speed model's rates instead, for target=FILE"
            ),
        },
        commands=(
            Command(
                record,
                "train whole models in bf16, in FP8 and by torchao, and write one file of one run",
                {
                    "--model": dict(action="append", default=[], metavar="NAME", help="(default: all that fit)"),
                    "--only": dict(action="append", default=[], metavar="CONTENDER", help="(default: all)"),
                    "--steps": dict(type=_positive, help="of each training; the first ones are not timed"),
                    "--out": dict(type=Path, default=Path("record.json"), metavar="FILE.json", help="(record.json)"),
                    "--entity": dict(default="fp8graph", metavar="NAME", help="who measured, for torchtitan's file"),
                    "--any-tree": dict(action="store_true", help="measure changed files too; it is not published"),
                    "--tiny": dict(action="store_true", help="small models on any machine, to try it"),
                },
            ),
        ),
    ),
    Command(
        completion,
        'print the completion for a shell: eval "$(fp8graph completion bash)"',
        {"shell": dict(choices=("bash", "zsh"))},
    ),
)
