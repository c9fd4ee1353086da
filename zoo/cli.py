"""The command line: list, info, check, parity, train, publish, sweep, bench, verify, report, compare, demo, doctor.

Here are the arguments alone. What a command does is in :mod:`zoo.commands`, or in a module of the command's own, and is
imported when the command runs: torch takes seconds to import, and ``zoo --help`` has no need of it.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from zoo.commands.output import AsJson, deliver, tell
from zoo.launch import rank
from zoo.report import Report
from zoo.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="zoo",
    help="The proving ground for custom layers: put one into real models, prove it, time it.",
    epilog="Exit codes: 0 all is well, 1 something failed, 2 the command was not understood, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Source(str, Enum):
    """Whose models."""

    zoo = "zoo"
    torchvision = "torchvision"
    timm = "timm"


class Library(str, Enum):
    """A library with reference models."""

    torchvision = "torchvision"
    timm = "timm"


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A model, as resnet50, torchvision/vit_b_16 or timm/convnext_tiny.")
]
Weights = Annotated[
    str,
    typer.Option(metavar="NAME|PATH|none", help="Trained weights by name or file; none: fresh ones from a fixed seed."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the model, as num_classes=10; repeatable."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; auto: a GPU where there is one.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zoo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[PATTERN]", help="Names with *, ? and [], as timm/vit_*.", show_default=False),
    ] = None,
    pattern: Annotated[str | None, typer.Option("--pattern", metavar="PATTERN", help="The same, as an option.")] = None,
    source: Annotated[Source | None, typer.Option(help="Only the models of this library.")] = None,
    swappable: Annotated[
        str | None,
        typer.Option(
            metavar="COMPARISON",
            help="Only models whose share of FLOPs that custom layers can take is such, as '>0.9' or '<=50%'.",
        ),
    ] = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="A table: parameters, Linears, their share of the FLOPs, input.")
    ] = False,
    layers: Annotated[bool, typer.Option("--layers", help="The layers that can be swapped in, not models.")] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="The trained weights that come with zoo, not models: a table.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the models, or the layers, that zoo knows: one name a line, or with --fields or --swappable a table.

    The figures were measured by zoo sweep and come with zoo. Those of a model that is not among them are computed on
    the meta device, in a few seconds each.
    """

    def work() -> Report:
        from zoo.commands.listing import list_fields, list_layers, list_models, list_weights

        if name is not None and pattern is not None:
            raise ValueError(f"the pattern is given twice, as {name!r} and as {pattern!r}; leave one out")
        glob = name or pattern or "*"
        if layers and weights:
            raise ValueError("--layers and --weights are two lists; leave one out")
        if layers:
            return list_layers(glob)
        if weights:
            return list_weights(glob)
        library = source.value if source else None
        if fields or swappable is not None:
            return list_fields(glob, source=library, swappable=swappable)
        return list_models(glob, source=library)

    deliver(work, as_json=as_json)


@app.command()
def info(name: Name, option: Options = None, as_json: AsJson = False) -> None:
    """Show a model: its size, its Linears and which of them can be swapped, its options and weights.

    The model is built without memory, so this is quick for the largest as well.
    """

    def work() -> Report:
        from zoo.commands.info import describe
        from zoo.preparing import options_from

        return describe(name, options=options_from(option or ()))

    deliver(work, as_json=as_json)


@app.command()
def check(
    name: Name,
    against: Annotated[
        Library | None, typer.Option(help="The library to compare with; by default the model's own, or torchvision.")
    ] = None,
    weights: Weights = "none",
    gradients: Annotated[bool, typer.Option("--gradients", help="Compare every gradient as well.")] = False,
    option: Options = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Check a model with custom layers against torchvision's or timm's: its state dict, then its outputs.

    The outputs, on real images, are judged by their error against float64: those of the custom model may be no worse
    than twice those of the library's.
    """

    def work() -> Report:
        from zoo.commands.check import check as run
        from zoo.preparing import options_from

        return run(
            name,
            against=against.value if against else None,
            weights=None if weights == "none" else weights,
            gradients=gradients,
            device=device,
            options=options_from(option or ()),
        )

    deliver(work, as_json=as_json)


@app.command()
def parity(
    name: Name,
    data: Annotated[
        str, typer.Option(metavar="DIR|NAME", help="An image folder (one sub-folder a class), digits or fashion_mnist.")
    ],
    weights: Weights = "none",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many images, evenly taken from all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 64,
    size: Annotated[int | None, typer.Option(min=1, help="Side that the built-in sets' images are brought to.")] = None,
    option: Options = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare the top-1 accuracy of a model with stock and with custom layers on real images.

    Fails where they differ by more than rounding explains: a prediction may change only if the stock model's two best
    classes are as near to each other as rounding errors are.
    """

    def work() -> Report:
        from zoo.commands.accuracy import compare
        from zoo.preparing import options_from

        return compare(
            name,
            data=data,
            weights=None if weights == "none" else weights,
            limit=limit,
            batch_size=batch_size,
            size=size,
            device=device,
            options=options_from(option or ()),
        )

    deliver(work, as_json=as_json)


class Reference(str, Enum):
    """Whose layers a training is compared with."""

    torch = "torch"


def _tuning(help: str, **limits: Any) -> Any:
    """An option of a training run; where it is not given, the file of --config or TrainConfig decides."""
    return typer.Option(help=help, show_default=False, rich_help_panel="The run", **limits)


@app.command()
def train(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As resnet50 or timm/convnext_tiny.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        _tuning(
            "digits, fashion_mnist, mnist, cifar10, cifar100 (each NAME:DIR), or a folder with train/ and val/.",
            metavar="NAME|DIR",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the run goes.", show_default="runs/MODEL")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE.toml", help="A run's config.toml; what is given beside it goes before.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, or begin where there is none.")
    ] = False,
    compare: Annotated[
        Reference | None, typer.Option(help="Train with torch's Linears and with zoo's, and compare the curves.")
    ] = None,
    custom_linear: Annotated[bool | None, _tuning("zoo's Linears or torch's. (torch's)")] = None,
    weights: Annotated[str | None, _tuning("Weights to start from. (none)", metavar="NAME|PATH")] = None,
    reset_head: Annotated[bool | None, _tuning("Keep a fresh classifier, whatever the weights have.")] = None,
    option: Options = None,
    size: Annotated[int | None, _tuning("Side of the images. (what the model takes)")] = None,
    epochs: Annotated[int | None, _tuning("Times through the images. (10)")] = None,
    batch_size: Annotated[int | None, _tuning("Images of a forward pass, of all ranks together. (128)")] = None,
    accumulate: Annotated[int | None, _tuning("Passes of an optimizer step. (1)")] = None,
    optimizer: Annotated[str | None, _tuning("One of timm's. (adamw)", metavar="NAME")] = None,
    lr: Annotated[float | None, _tuning("Learning rate. (0.001)")] = None,
    weight_decay: Annotated[float | None, _tuning("(0)")] = None,
    momentum: Annotated[float | None, _tuning("(0.9)")] = None,
    schedule: Annotated[str | None, _tuning("cosine, tanh, step, poly or none. (cosine)", metavar="NAME")] = None,
    warmup_epochs: Annotated[int | None, _tuning("(0)")] = None,
    min_lr: Annotated[float | None, _tuning("Where the schedule ends. (0)")] = None,
    decay_epochs: Annotated[int | None, _tuning("Of schedule step. (90)")] = None,
    decay_rate: Annotated[float | None, _tuning("Of schedules step and poly. (0.1)")] = None,
    clip_grad: Annotated[float | None, _tuning("Largest norm of the gradients. (none)")] = None,
    label_smoothing: Annotated[float | None, _tuning("(0)")] = None,
    mixup: Annotated[float | None, _tuning("Alpha of mixup. (0: none)")] = None,
    cutmix: Annotated[float | None, _tuning("Alpha of cutmix. (0: none)")] = None,
    ema: Annotated[float | None, _tuning("Decay of averaged weights. (none)")] = None,
    autocast: Annotated[str | None, _tuning("none, bf16 or fp16. (none)", metavar="TYPE")] = None,
    channels_last: Annotated[bool | None, _tuning("Memory format of images and convolutions.")] = None,
    device: Annotated[str | None, _tuning("cpu, cuda or cuda:N. (auto)", metavar="NAME")] = None,
    compile: Annotated[bool | None, _tuning("Compile the model with torch.compile.")] = None,
    grad_checkpointing: Annotated[bool | None, _tuning("Less memory, and more to compute; timm's models.")] = None,
    strategy: Annotated[str | None, _tuning("Under torchrun: ddp, fsdp or tp. (ddp)", metavar="NAME")] = None,
    sync_bn: Annotated[bool | None, _tuning("Batch norms over all ranks, on GPUs.")] = None,
    workers: Annotated[int | None, _tuning("Processes that read images. (0)")] = None,
    seed: Annotated[int | None, _tuning("(0)")] = None,
    on_corrupt: Annotated[
        str | None, _tuning("An image that cannot be read: error or replace. (error)", metavar="POLICY")
    ] = None,
    checkpoint_every: Annotated[int | None, _tuning("Steps between checkpoints. (an epoch's)")] = None,
    keep_last: Annotated[int | None, _tuning("Checkpoints to keep. (2)")] = None,
    log_every: Annotated[int | None, _tuning("Steps of a line in the log. (50)")] = None,
    tensorboard: Annotated[bool | None, _tuning("Curves for TensorBoard, too, in DIR/tensorboard.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model; killed at any moment, it goes on with --resume as if nothing had been.

    The folder then has config.toml, log.jsonl, best.safetensors and final.safetensors, for zoo.load, and checkpoints.
    On several GPUs or processes: torchrun --nproc-per-node 4 -m zoo.train MODEL ... --strategy ddp
    """
    told = {name: value for name, value in locals().items() if name not in ("out", "config", "resume", "as_json")}

    def work() -> Report:
        from zoo.commands.train import run
        from zoo.preparing import options_from

        told["options"] = options_from(told.pop("option") or ()) or None
        against = told.pop("compare") is not None
        return run(told, config=config, out=out, resume=resume, compare=against)

    deliver(work, as_json=as_json, rank=rank())


@app.command()
def publish(
    source: Annotated[
        str, typer.Argument(metavar="RUN|FILE|NAME", help="A run of zoo train, a .safetensors file, or zoo's weights.")
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="DIR", help="The folder to write; nothing is overwritten.")
    ],
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="Of the weights, as mit or apache-2.0.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as a folder in Hugging Face's layout: weights, config.json, and a model card.

    zoo.load reads it; and so does timm, as "local-dir:DIR", where it has the architecture: that is tried, and the
    logits are compared bit for bit, before the folder appears.
    """

    def work() -> Report:
        from zoo.publishing import publish as run

        return run(source, out, license=license)

    deliver(work, as_json=as_json)


class Where(str, Enum):
    """What a sweep runs models on."""

    data = "data"
    meta = "meta"


@app.command()
def sweep(
    glob: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GLOB]...", help="Models by name, as 'torchvision/*'; all, unless told."),
    ] = None,
    on: Annotated[
        Where, typer.Option(help="Run on data; or on the meta device, which computes shapes alone.")
    ] = Where.data,
    device: Device = "auto",
    shard: Annotated[str, typer.Option(metavar="K/N", help="Every N-th model, beginning with the K-th.")] = "1/1",
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Look at up to N models together, the largest first.")
    ] = 1,
    out: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="Add a line for each model as soon as it is done.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Leave out what the file has already, or begin it anew.")
    ] = True,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="On data: a backward, and every gradient compared.")
    ] = True,
    small: Annotated[
        bool, typer.Option("--small", help="On data: images of the smallest size that a model takes.")
    ] = False,
    max_parameters: Annotated[
        str, typer.Option(metavar="NUMBER", help="A model with more, as 700M, is only built on the meta device.")
    ] = "700M",
    time_limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For one model.")] = 600,
    time_budget: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Begin no model later; resume with the same command.")
    ] = None,
    save_fields: Annotated[
        bool, typer.Option("--save-fields", help="Put the figures that list and info show into the package.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Swap the Linears of many models, one by one, and prove each: run, compared, and put back exactly.

    Each is patched, run forward and backward, compared with its library's own (state dict both ways, outputs and
    gradients), and unpatched; its FLOPs are counted. A model that fails, hangs or takes all memory costs only itself.
    """

    def work() -> Report:
        from zoo.commands.sweep import run

        return run(
            globs=glob or (),
            on=on.value,
            device=device,
            shard=shard,
            processes=processes,
            out=out,
            resume=resume,
            gradients=gradients,
            small=small,
            max_parameters=max_parameters,
            time_limit=time_limit,
            time_budget=time_budget,
            save=save_fields,
        )

    deliver(work, as_json=as_json)


bench = typer.Typer(name="bench", no_args_is_help=True, help="Time zoo's Linear beside torch's, alone or in models.")
app.add_typer(bench)

JsonTo = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write JSON into a file as it comes; - or nothing: print it."),
]
PlotTo = Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Draw the speedups.")]
Peers = Annotated[str, typer.Option("--peer", metavar="LIST", help="Of eager, compiled (by torch.compile).")]
Seed = Annotated[int, typer.Option(help="Of the data and of the order of the timings.")]


class WithJson(TyperCommand):
    """A command whose ``--json`` may stand alone, as that of the others does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], "--"]
        filled = [
            word
            for arg, after in zip(args, following, strict=True)
            for word in ([arg, "-"] if arg == "--json" and after.startswith("--") else [arg])
        ]
        return super().parse_args(ctx, filled)


@bench.command("linear", cls=WithJson)
def bench_linear(
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="GLOB", help="Cases by name, as vit_b/*; repeatable. All, unless told."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="LIST", help="Of f32, bf16, f16, f64.")] = "f32,bf16",
    precision: Annotated[
        str, typer.Option(metavar="LIST", help="Of highest, high, medium: what torch may make of float32's products.")
    ] = "highest",
    pass_: Annotated[
        str, typer.Option("--pass", metavar="LIST", help="Of forward, forward+backward.")
    ] = "forward,forward+backward",
    peer: Peers = "eager,compiled",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Small cases, few repetitions.")] = False,
    repeats: Annotated[int | None, typer.Option(min=2, help="Repetitions, at most.")] = None,
    seed: Seed = 0,
    json: JsonTo = None,
    plot: PlotTo = None,
) -> None:
    """Time zoo's Linear beside F.linear and the activation, on the shapes of real models.

    All are timed in one run, in random order, on buffers that are rotated through the cache; what the timed calls
    computed is compared with float64. Fails where an output is wrong, not where zoo is slower.
    """

    def work() -> Report:
        from zoo.commands.bench import linear

        return linear(
            cases=case or (),
            dtypes=dtype,
            precisions=precision,
            passes=pass_,
            peers=peer,
            device=device,
            quick=quick,
            repeats=repeats,
            seed=seed,
            json=json,
            plot_to=plot,
        )

    deliver(work, as_json=json == "-")


@bench.command("serve", cls=WithJson)
def bench_serve(
    model: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models; five of them, unless told.")
    ] = None,
    mode: Annotated[str, typer.Option(metavar="LIST", help="Of fp32, tf32, bf16 (autocast).")] = "fp32,bf16",
    peer: Annotated[
        str, typer.Option(metavar="LIST", help="Of eager, compiled (mode reduce-overhead: CUDA graphs on a GPU).")
    ] = "eager,compiled",
    batch: Annotated[str, typer.Option(metavar="LIST", help="Images of a request.")] = "1,8",
    image: Annotated[int, typer.Option(min=1, help="Their height and width.")] = 224,
    device: Device = "auto",
    calls: Annotated[int, typer.Option(min=2, help="Timed calls of each side, at most.")] = 500,
    seed: Seed = 0,
    json: JsonTo = None,
) -> None:
    """Time single requests to models with zoo's Linears and with torch's: latencies, their median, 90% and 99%.

    Both sides are called in turn, in short runs in random order; a call ends when its logits are there. Fails where
    logits part, or answer another request, not where zoo is slower.
    """

    def work() -> Report:
        from zoo.commands.bench import serve as run

        return run(
            models=model or (),
            modes=mode,
            peers=peer,
            batches=batch,
            image=image,
            device=device,
            calls=calls,
            seed=seed,
            json=json,
        )

    deliver(work, as_json=json == "-")


@bench.command("model", cls=WithJson)
def bench_model(
    model: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models; five of them, unless told.")
    ] = None,
    mode: Annotated[str, typer.Option(metavar="LIST", help="Of fp32, tf32, bf16 (autocast).")] = "fp32,bf16",
    phase: Annotated[str, typer.Option(metavar="LIST", help="Of train, infer.")] = "train,infer",
    peer: Peers = "eager,compiled",
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 64,
    image: Annotated[int, typer.Option(min=1, help="Their height and width.")] = 224,
    device: Device = "auto",
    seed: Seed = 0,
    json: JsonTo = None,
    plot: PlotTo = None,
) -> None:
    """Time models with zoo's Linears beside the same models with torch's, in images a second.

    Fails where outputs or losses of the two part, not where zoo is slower.
    """

    def work() -> Report:
        from zoo.commands.bench import model as run

        return run(
            models=model or (),
            modes=mode,
            phases=phase,
            peers=peer,
            batch=batch,
            image=image,
            device=device,
            seed=seed,
            json=json,
            plot_to=plot,
        )

    deliver(work, as_json=json == "-")


HtmlTo = Annotated[
    str | None, typer.Option("--html", metavar="FILE.html", help="Write one page with everything, for a browser.")
]


@app.command(cls=WithJson)
def verify(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="module:Name of a class or function, or a registered layer's name."),
    ],
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="linear, layer_norm, conv2d or mlp.")] = "linear",
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODULE:NAME",
            help="A class to compare with in the place of the stock layer: its twin.",
        ),
    ] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option("--claim", metavar="GLOB", help="Claims by name, as 'gradients*'; repeatable. All, unless told."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            metavar="NAME,NAME|none",
            help="Whole models to try it in, as mlp,resnet18,timm/vit_tiny_patch16_224. Two small ones, unless told.",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    time_limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For one claim.")] = 120,
    memory_limit: Annotated[str, typer.Option(metavar="GiB|none", help="What a worker on the CPU may allocate.")] = "8",
    timing: Annotated[
        bool, typer.Option("--timing", help="Time the layer too, beside the stock one, eager and compiled.")
    ] = False,
    timing_form: Annotated[
        str, typer.Option(metavar="FORM", help="quick: 3 fresh processes; full: 5, more blocks and more shapes.")
    ] = "quick",
    json: JsonTo = None,
    html: HtmlTo = None,
) -> None:
    """Judge a layer claim by claim: pass, fail, refused (a clear error) or untested (why).

    The layer alone, on a GPU with --device cuda, in several processes, and in whole models. Values and gradients are
    judged by their error against float64, relative to the stock layer's own. Each claim is checked in a worker process
    with limits, so that a hang or a crash costs that claim alone. Modules are looked for in the current folder too.
    Fails where a claim fails, the values were not judged right, or a time is SUSPECT; being slower is no failure.
    """

    def work() -> Report:
        from zoo.commands.verify import run

        return run(
            target,
            kind=kind,
            against=against,
            claims=claim or (),
            models=models,
            device=device,
            seed=seed,
            time_limit=time_limit,
            memory_limit=memory_limit,
            timing=timing_form if timing else None,
            json=json,
            html=html,
        )

    deliver(work, as_json=json == "-")


@app.command()
def report(
    file: Annotated[str, typer.Argument(metavar="FILE.json", help="What zoo verify --json wrote.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE.html", help="Where the page goes.")],
    as_json: AsJson = False,
) -> None:
    """Make the page of a verdict: one HTML file that needs no network."""

    def work() -> Report:
        from zoo.commands.page import make

        return make(file, out)

    deliver(work, as_json=as_json)


@app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="A.json", help="What zoo verify --json wrote.")],
    after: Annotated[str, typer.Argument(metavar="B.json", help="The same, later or of another layer.")],
    as_json: AsJson = False,
) -> None:
    """Show what changed between two verdicts: claims, speed, environment. Fails where something got worse."""

    def work() -> Report:
        from zoo.verify.comparing import compare_files

        return compare_files(before, after)

    deliver(work, as_json=as_json)


@app.command()
def demo(device: Device = "auto", as_json: AsJson = False) -> None:
    """Show the main job in about a minute, without network or GPU.

    Puts the custom Linear into resnet50, checks it against torchvision's on real photos, then trains an MLP on real
    digits twice from one seed, stock and custom, and sets the results side by side.
    """

    def work() -> Report:
        from zoo.demo import demo as run

        return run(device=device, say=tell)

    deliver(work, as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is built, for which GPUs, what would be used here, and what is wrong if something is."""

    def work() -> Report:
        from zoo.doctor import examine

        return examine()

    deliver(work, as_json=as_json)


def main() -> None:
    """Entry point of the ``zoo`` script."""
    app()
