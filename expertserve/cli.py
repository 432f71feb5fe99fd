"""The command line: parses, calls and prints; what a command does lies in the module it calls.

Options are made from the declarations in config.py, so there is no second list of names or defaults here. A user's
error is one line on standard error with the exit code of its class. Heavy modules are imported inside the commands, so
that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertserve import __version__
from expertserve.config import SETTINGS, Settings, prepare_libraries, resolve
from expertserve.declare import Setting
from expertserve.errors import ConfigError, ExpertServeError
from expertserve.values import parse_bytes

if TYPE_CHECKING:
    from expertserve.experts.stats import ExpertStats

# typer keeps its parser's exceptions private; the base of all of them is BadParameter's grandparent.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
_EPILOG = (
    "Each option is also an environment variable (EXPERTSERVE_PORT for --port) and a key of the --config file "
    "(port); a flag wins over the environment, the environment over the file."
)

app = typer.Typer(
    name="expertserve",
    help="Serves Mixture-of-Experts GGUF models that are larger than memory.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _parameter(setting: Setting) -> inspect.Parameter:
    declared = setting.declared
    kind: Any = bool | None if declared.switch else list[str] | None if setting.repeatable else str | None
    about = f"{declared.reason} [default: {setting.default_text}]"
    if setting.name == "model":
        info: Any = typer.Argument(metavar="MODEL", help=declared.reason, show_default=False)
    else:
        names = [setting.flag, *([declared.short] if declared.short else [])]
        metavar = None if declared.switch else setting.metavar
        info = typer.Option(*names, metavar=metavar, help=about, show_default=False)
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


_PROMPT = inspect.Parameter(
    "prompt",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="What to answer; without it standard input is, and on a terminal a chat starts.",
            show_default=False,
        ),
    ],
)


def _command(name: str, *extra: inspect.Parameter) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers `body(settings, stats, **extra)` as a command with an option for each setting that it obeys."""

    def register(body: Callable[..., int]) -> Callable[..., int]:
        def command(**values: Any) -> int:
            own = {parameter.name: values.pop(parameter.name) for parameter in extra}
            given = {key: value for key, value in values.items() if value is not None and value != []}
            return body(*_start(name, given), **own)

        settings = [_parameter(setting) for setting in SETTINGS.values() if setting.declared.offered_by(name)]
        parameters = [settings[0], *extra, *settings[1:]]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = body.__doc__
        app.command(name, epilog=_EPILOG)(command)
        return body

    return register


def _on_a_device(settings: Settings) -> Settings:
    """The settings with a device in place of auto; makes ready for the libraries that compute."""
    prepare_libraries()
    if settings.device != "auto":
        return settings
    from expertserve.ops.factory import best_device

    return replace(settings, device=best_device())


def _would_break_the_answer(command: str, settings: Settings) -> bool:
    """Whether statistics that nobody asked for would appear within an answer, both being shown on a terminal."""
    return command == "run" and "stats_every" not in settings.origin and sys.stdout.isatty() and sys.stderr.isatty()


def _start(command: str, flags: dict[str, Any]) -> tuple[Settings, ExpertStats]:
    """Resolves the settings; from here on a process with a model ends with the final statistics line, come what may."""
    settings = resolve(flags, command=command)
    has_model = not settings.loads_server(command)
    settings = _on_a_device(settings) if has_model else settings
    from expertserve.experts.final_line import install_final_line
    from expertserve.experts.stats import ExpertStats

    stats = ExpertStats(every=0 if _would_break_the_answer(command, settings) else settings.stats_every)
    if has_model:
        install_final_line(stats, json_path=settings.stats_json)
    from expertserve import log

    log.configure(settings.log_format, settings.log_level)
    logger = log.get_logger(__name__)
    for line in settings.inert(command):
        logger.warning(line)
    if has_model and (crowded := settings.crowded()):
        logger.warning(crowded)
    return settings, stats


@_command("run", _PROMPT)
def _run(settings: Settings, stats: ExpertStats, *, prompt: str | None) -> int:
    """Answers one prompt, or chats on a terminal."""
    from expertserve.terminal import run

    return run(settings, stats, prompt)


@_command("serve")
def _serve(settings: Settings, stats: ExpertStats) -> int:
    """Serves the model over HTTP with OpenAI's API."""
    from expertserve.server.app import serve

    return serve(settings, stats)


@_command("bench")
def _bench(settings: Settings, stats: ExpertStats) -> int:
    """Times prefill and decode, of one configuration or of many, or loads a server; ends with a line of JSON."""
    if settings.serve is not None:
        return _load(settings)
    from expertserve.bench.rates import bench
    from expertserve.bench.sweep import is_sweep, sweep

    if settings.synth:
        from expertserve.bench.synth import of_made_model, write_only

        if settings.write_only:
            return write_only(settings)
        settings = of_made_model(settings)
    return sweep(settings, stats) if is_sweep(settings) else bench(settings, stats)


def _load(settings: Settings) -> int:
    try:
        from expertserve.bench.load import load
    except ModuleNotFoundError as error:
        raise ConfigError(f"--serve needs {error.name}: pip install 'expertserve[bench]'") from error
    return load(settings)


@app.command("doctor")
def _doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A GGUF whose disk is tried; the embedded model's without.", show_default=False
        ),
    ] = None,
) -> int:
    """Says what of this machine would be used, and what is in the way."""
    prepare_libraries()
    from expertserve.doctor import doctor

    return doctor(model)


_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command("plan")
def _plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF, also one that is still being downloaded.")],
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory to plan for, also of a --device that is not here. [default: what is free here]",
        ),
    ] = None,
    ctx: Annotated[str | None, typer.Option("--ctx", "-c", metavar="N", help="Tokens of context.")] = None,
    kv_type: Annotated[str | None, typer.Option("--kv-type", metavar="f16|f32|q8_0", help="Of the KV cache.")] = None,
    expert_cache: Annotated[
        str | None, typer.Option("--expert-cache", metavar="SIZE", help="Room for routed experts, as in `serve`.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="Where it would compute, as in `serve`.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Routing trace of the model, for hit rates of its own."),
    ] = None,
    as_json: _AsJson = False,
) -> int:
    """Says from a model's header what fits, and predicts rates by short trials."""
    given = {"model": model, "ctx": ctx, "kv_type": kv_type, "expert_cache": expert_cache, "device": device}
    settings = _on_a_device(resolve({key: value for key, value in given.items() if value is not None}))
    from expertserve.bench.plan import show_plan

    return show_plan(settings, memory, trace, as_json=as_json)


trace_app = typer.Typer(help="Says what a routing trace (of --trace) holds.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")

_TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="A routing trace; xz may have compressed it.")]
_Slots = Annotated[
    str,
    typer.Option("--slots", metavar="PERCENT,...", help="Slots to replay with, in percent of all experts."),
]
_SLOTS = "5,10,15,25,35,50,65,75,90"


@trace_app.command("stats")
def _trace_stats(file: _TraceFile, as_json: _AsJson = False) -> int:
    """Reuse distance, and each layer's skew, entropy and repetition."""
    from expertserve.bench.lab import show_stats

    return show_stats(file, as_json=as_json)


@trace_app.command("replay")
def _trace_replay(file: _TraceFile, slots: _Slots = _SLOTS, as_json: _AsJson = False) -> int:
    """Hit rate over slots of LRU, LFU, ours and Belady's optimum, and of a shuffled control."""
    from expertserve.bench.lab import parse_shares, show_replay

    return show_replay(file, parse_shares(slots), as_json=as_json)


@trace_app.command("simulate")
def _trace_simulate(
    file: _TraceFile,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="The GGUF it was recorded of; its header is enough.")
    ],
    slots: _Slots = _SLOTS,
    disk_bandwidth: Annotated[
        str | None, typer.Option("--disk-bandwidth", metavar="SIZE", help="Bytes a second of the disk, as in 7GB.")
    ] = None,
    disk_latency: Annotated[
        float | None,
        typer.Option("--disk-latency", metavar="US", min=0, help="Microseconds until a read's bytes come."),
    ] = None,
    disk_depth: Annotated[
        int | None, typer.Option("--disk-depth", metavar="N", min=1, max=4096, help="Reads under way at once.")
    ] = None,
    memory_bandwidth: Annotated[
        str | None,
        typer.Option("--memory-bandwidth", metavar="SIZE", help="Bytes a second of memory; kernels scale with it."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="Where it would compute, as in `serve`.")
    ] = None,
    lookahead: Annotated[
        str | None,
        typer.Option("--lookahead", metavar="on|off|auto", help="As in `serve`; it foresees what the trace's did."),
    ] = None,
    as_json: _AsJson = False,
) -> int:
    """Predicts the recorded run's decode rate over slots, with this machine's disk and memory or with others."""
    given = {"model": model, "device": device, "lookahead": lookahead}
    settings = _on_a_device(resolve({key: value for key, value in given.items() if value is not None}))
    from expertserve.bench.lab import parse_shares
    from expertserve.bench.simulate import OtherDisk, show_simulation

    disk = OtherDisk(
        bandwidth=_rate("--disk-bandwidth", disk_bandwidth),
        latency_s=None if disk_latency is None else disk_latency / 1e6,
        depth=disk_depth,
    )
    memory = _rate("--memory-bandwidth", memory_bandwidth)
    return show_simulation(settings, file, parse_shares(slots), disk, memory, as_json=as_json)


def _rate(flag: str, text: str | None) -> int | None:
    """Bytes a second of an option."""
    if text is None:
        return None
    try:
        rate = parse_bytes(text)
    except ValueError:
        rate = 0
    if rate < 1:
        raise ConfigError(f"{flag} {text}: should be bytes a second, such as 7GB or 500MiB")
    return rate


@trace_app.command("plot")
def _trace_plot(
    file: _TraceFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PICTURE", help="Where to write it; .png, .svg or .pdf.")],
    slots: _Slots = _SLOTS,
) -> int:
    """Draws hit rate over slots, reuse distance and the use of experts; needs the extra `plot`."""
    from expertserve.bench.lab import draw, parse_shares

    return draw(file, out, parse_shares(slots))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"expertserve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status of the process."""
    try:
        return app(arguments, prog_name="expertserve", standalone_mode=False) or 0
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            return 2
        return _fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except ExpertServeError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of standard output went away; keep the interpreter from failing again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
