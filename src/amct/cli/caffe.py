"""``amct caffe``: train, retrain, test and time Caffe nets, run scripts written for pycaffe, without a real Caffe."""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amct import log
from amct.arguments import output_file
from amct.cli import caffe_patch
from amct.cli.own_layers import takes_own_layers
from amct.cli.printing import show
from amct.errors import AmctError, ArgumentError, FileError, TrainingError
from amct.log import few_lines
from amct.model.verdict import NOT_JUDGED

if TYPE_CHECKING:
    import signal

    from amct.caffe.engine.solvers.solver import Action

app = typer.Typer(
    name="caffe",
    help="Train, test and time Caffe nets, and run scripts written for pycaffe. No Caffe needs to be installed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.add_typer(caffe_patch.app)

INTERRUPTED = 130
SCRIPT_FAILED = 1


class Effect(str, Enum):
    """The effect of a signal on training."""

    none = "none"
    stop = "stop"
    snapshot = "snapshot"


class Phase(str, Enum):
    """The phase of a net; in the order of Caffe's numbers."""

    train = "TRAIN"
    test = "TEST"


WeightsHelp = "Weights to start from: a caffemodel, or several separated by commas."
GpuOption = Annotated[bool, typer.Option("--gpu", help="Run on a CUDA device.")]
DeviceOption = Annotated[int | None, typer.Option("--device", help="Which CUDA device; 0 unless the solver says.")]
LevelOption = Annotated[int, typer.Option("--level", help="The level that include/exclude rules see.")]
StageOption = Annotated[list[str] | None, typer.Option("--stage", help="A stage that include/exclude rules see.")]


@app.command()
@takes_own_layers
@log.screen_only()
def train(  # noqa: PLR0913 - a command's options are its arguments
    solver: Annotated[str, typer.Option("--solver", help="The solver prototxt.")],
    weights: Annotated[str | None, typer.Option("--weights", help=WeightsHelp)] = None,
    snapshot: Annotated[str | None, typer.Option("--snapshot", help="A solver state to go on from.")] = None,
    gpu: GpuOption = False,
    device: DeviceOption = None,
    level: LevelOption = 0,
    stage: StageOption = None,
    sigint_effect: Annotated[Effect, typer.Option(help="What Ctrl-C does (a second Ctrl-C stops at once).")] = (
        Effect.stop
    ),
    sighup_effect: Annotated[Effect, typer.Option(help="What a hang-up signal does.")] = Effect.snapshot,
) -> int:
    """Train a net as its solver prototxt says. Ctrl-C finishes the iteration, writes a snapshot and stops."""
    from amct.caffe.engine.blob import choose_device
    from amct.caffe.engine.solvers.definition import read_solver
    from amct.caffe.engine.solvers.solver import EngineSolver, signal_actions

    if weights is not None and snapshot is not None:
        raise ArgumentError("give --snapshot to go on or --weights to start from, not both")
    parameter = read_solver(solver)
    if weights is not None:
        parameter.ClearField("weights")
        parameter.weights.append(weights)
    if level:
        parameter.train_state.level = level
    parameter.train_state.stage.extend(stage or [])
    choose_device(gpu=gpu, device=device, parameter=parameter)
    running = EngineSolver(parameter)
    with signal_actions(_effects(sigint_effect, sighup_effect)) as requests:
        running.action_source = requests
        running.solve(snapshot)
    return INTERRUPTED if running.stopped_early else 0


@app.command()
@takes_own_layers
@log.screen_only()
def retrain(  # noqa: PLR0913 - a command's options are its arguments
    solver: Annotated[Path, typer.Option("--solver", help="The solver prototxt; its net is replaced.")],
    model: Annotated[Path, typer.Option("--model", help="The net's prototxt, with the layers of both phases.")],
    weights: Annotated[Path, typer.Option("--weights", help="The caffemodel of the trained float net.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the files go: folder/prefix.")],
    config: Annotated[Path | None, typer.Option(help="A config of retraining, simple (.cfg) or full (.json).")] = None,
    iterations: Annotated[int | None, typer.Option(help="Training iterations; max_iter of the solver if none.")] = None,
    snapshot: Annotated[str | None, typer.Option("--snapshot", help="A solver state to go on from.")] = None,
    gpu: GpuOption = False,
    device: DeviceOption = None,
) -> int:
    """Train a net for quantization, and write its INT8 files with a report. Ctrl-C writes a snapshot and stops."""
    import signal

    from amct.caffe.engine.blob import choose_device
    from amct.caffe.engine.solvers.solver import Action, signal_actions
    from amct.caffe.qat.door import prepare_qat

    page = output_file(output.parent / f"{output.name}_report.html", "the report")
    choose_device(gpu=gpu, device=device)
    work = output.parent / f"{output.name}_retrain"
    with few_lines():
        prepared = prepare_qat(model, weights, solver, config, folder=work, iterations=iterations)
        with signal_actions({signal.SIGINT: Action.STOP}) as requests:
            try:
                prepared.train(snapshot, action_source=requests)
            except TrainingError as error:
                if not prepared.stopped_early:
                    raise
                show(f"error: {error}")
                return INTERRUPTED
        files = prepared.save(output)
    report = prepared.report(page, files)
    for name, after in prepared.scores_after.items():
        show(f"{name}: {prepared.scores_before[name]:.4g} before, {after:.4g} after")
    for path in (*files, report):
        show(f"written: {path}")
    show(f"verdict: {prepared.verdict or NOT_JUDGED}")
    return 0


@app.command(name="test")
@takes_own_layers
@log.screen_only()
def evaluate_net(
    model: Annotated[str, typer.Option("--model", help="The net's prototxt.")],
    weights: Annotated[str, typer.Option("--weights", help=WeightsHelp)],
    iterations: Annotated[int, typer.Option("--iterations", help="How many batches to run.")] = 50,
    gpu: GpuOption = False,
    device: DeviceOption = None,
    level: LevelOption = 0,
    stage: StageOption = None,
) -> None:
    """Run the TEST phase of a net over some batches and print the mean of each output."""
    from amct.caffe.engine.blob import choose_device
    from amct.caffe.engine.layer import TEST
    from amct.caffe.engine.net import Net
    from amct.caffe.engine.solvers.solver import evaluate

    choose_device(gpu=gpu, device=device)
    net = Net.from_file(model, phase=TEST, level=level, stages=stage or [], with_gradients=False)
    for path in weights.split(","):
        net.load_weights(path.strip())
    for line in evaluate(net, iterations).lines():
        show(line)


@app.command(name="time")
@takes_own_layers
@log.screen_only()
def time_net(  # noqa: PLR0913 - a command's options are its arguments
    model: Annotated[str, typer.Option("--model", help="The net's prototxt.")],
    weights: Annotated[str | None, typer.Option("--weights", help=WeightsHelp)] = None,
    iterations: Annotated[int, typer.Option("--iterations", help="How many times to run the net.")] = 50,
    phase: Annotated[Phase, typer.Option("--phase", help="Whose layers run.")] = Phase.train,
    gpu: GpuOption = False,
    device: DeviceOption = None,
    level: LevelOption = 0,
    stage: StageOption = None,
) -> None:
    """Time each layer of a net, forward and backward, one layer at a time.

    Example: amct caffe time --model deploy.prototxt --iterations 10
    """
    from amct.caffe.engine.blob import choose_device
    from amct.caffe.engine.net import Net
    from amct.caffe.engine.timing import time_layers

    choose_device(gpu=gpu, device=device)
    net = Net.from_file(model, phase=list(Phase).index(phase), level=level, stages=stage or [])
    for path in weights.split(",") if weights else ():
        net.load_weights(path.strip())
    for line in time_layers(net, iterations).lines():
        show(line)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
@takes_own_layers
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The script; what follows it is passed on to it.")],
    force: Annotated[bool, typer.Option("--force", help="Hide a real Caffe that is installed too.")] = False,
) -> int:
    """Run a script that says ``import caffe`` with this toolkit as caffe."""
    import runpy

    from amct.caffe.pycaffe.runtime import imported_as_caffe

    if not script.is_file():
        raise FileError(f"{script}: there is no such script")
    arguments, folder = sys.argv, str(script.resolve().parent)
    with ExitStack() as stack:
        with log.screen_only():  # only here: AMCT functions called by the script write their log file as usual
            stack.enter_context(imported_as_caffe(force=force))
        sys.argv = [str(script), *context.args]
        sys.path.insert(0, folder)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except AmctError:
            traceback.print_exc()  # the author of the script needs the line number too
            return SCRIPT_FAILED
        finally:
            sys.argv = arguments
            if folder in sys.path:  # the script may have changed the list
                sys.path.remove(folder)
    return 0


@app.command(name="install-alias")
def install_alias(
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias again.")] = False,
) -> None:
    """Make ``import caffe`` work in this Python environment, for ``python3 old.py``; a real Caffe goes first.

    It writes one file, caffe.py, into the environment's site-packages, and nothing if something is called caffe there.
    """
    from amct.caffe import installed_alias

    if remove:
        path = installed_alias.remove_alias()
        show("nothing to remove: there is no alias here" if path is None else f"removed: {path}")
    else:
        show(f"written: {installed_alias.install_alias()}; amct caffe install-alias --remove removes it")


@app.command(name="merge-proto")
def merge_proto(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The joined .proto file to write; one that is there is kept as .bak.")
    ],
    custom: Annotated[Path | None, typer.Option("--custom", help="Your .proto file with layers of your own.")] = None,
    caffe: Annotated[Path | None, typer.Option("--caffe", help="A caffe.proto to join with instead of ours.")] = None,
) -> None:
    """Join caffe.proto with AMCT's layers and your custom.proto; clashes of names and numbers are errors."""
    from amct.caffe.proto_merge import merge_files

    for note in merge_files(custom, output, caffe).notes:
        show(f"note: {note}")
    show(f"written: {output}")


@app.command(name="to-onnx")
@takes_own_layers
def to_onnx(
    model: Annotated[str, typer.Option("--model", help="The net's prototxt; its TEST phase is exported.")],
    weights: Annotated[str, typer.Option("--weights", help="The net's caffemodel.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.")],
    opset: Annotated[int, typer.Option("--opset", help="The version of ONNX's operators, 16 to 21.")] = 18,
    end: Annotated[list[str] | None, typer.Option("--end", help="A blob to end at; the net's outputs if none.")] = None,
) -> None:
    """Write a Caffe model as a float ONNX file."""
    from amct.caffe.onnx.graph import export_onnx

    for note in export_onnx(model, weights, output, opset=opset, outputs=end or None):
        show(f"note: {note}")
    show(f"written: {output}")


def _effects(sigint: Effect, sighup: Effect) -> dict[signal.Signals, Action]:
    import signal

    from amct.caffe.engine.solvers.solver import Action

    effects = {signal.SIGINT: Action(sigint.value)}
    if hasattr(signal, "SIGHUP"):  # not on Windows
        effects[signal.SIGHUP] = Action(sighup.value)
    return effects
