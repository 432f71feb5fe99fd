"""Every setting of the program, declared once.

A declaration has a type, a default, a one-sentence reason and the commands that obey it; command-line options, help
text and docs/ENVIRONMENT.md are made from these. `resolve` takes flag > environment > --config file > default, once,
into a frozen object. Nothing else reads the environment, and a name that nobody declared is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from expertserve.cpus import physical_cores, usable_cpus
from expertserve.declare import COMMANDS, ENV_PREFIX, declarations, setting
from expertserve.errors import ConfigError
from expertserve.values import (
    ExpertBudget,
    file_or_off,
    file_to_write,
    parse_budget_or_off,
    parse_budgets,
    parse_bytes,
    parse_cap,
    parse_counts,
    parse_key,
    parse_list,
    parse_origins,
    parse_rates,
    parse_scale,
    parse_server,
    parse_words,
    readable_file,
)

_RUN, _SERVE, _BENCH, _TEXT = ("run",), ("serve",), ("bench",), ("run", "serve")
_LOAD = ("bench --serve",)  # what it obeys differs from what `bench` of a model obeys
_BENCHES, _ALL = (*_BENCH, *_LOAD), (*COMMANDS, *_LOAD)


def _greedy(settings: Settings) -> str | None:
    return "temperature is 0, so the most likely token is taken" if settings.temperature == 0 else None


def _no_draft(settings: Settings) -> str | None:
    return "--draft is off" if settings.draft == "off" else None


def _no_penalty(settings: Settings) -> str | None:
    off = settings.repeat_penalty == 1 and not settings.presence_penalty and not settings.frequency_penalty
    return "no penalty is set" if off else None


def _fed(settings: Settings) -> str | None:
    return "feed says which tokens are run, once" if settings.feed and not settings.serve else None


def _once(settings: Settings) -> str | None:
    cold = "a cold run is the first of its process" if settings.page_cache == "cold" else None
    return _fed(settings) or cold


def _no_synth(settings: Settings) -> str | None:
    return None if settings.synth else "there is no --synth"


def _synth_model(settings: Settings) -> str | None:
    return "the model is the one that --synth makes" if settings.synth and not settings.serve else None


def _layers_given(settings: Settings) -> str | None:
    return "--layers says how many" if settings.layers else _no_synth(settings)


def _no_chats(settings: Settings) -> str | None:
    return None if settings.arrival == "chat" else "--arrival is not chat"


def _chats(settings: Settings) -> str | None:
    return "--arrival is chat, so --rate says how many come" if settings.arrival == "chat" else None


def _not_on_cpu(settings: Settings) -> str | None:
    others = {"cuda": "the GPU computes", "reference": "the reference computes with NumPy"}
    return others.get(settings.device)


def _not_on_gpu(settings: Settings) -> str | None:
    return None if settings.device == "cuda" else "experts lie in host memory already"


def _no_keys(settings: Settings) -> str | None:
    return None if settings.api_key or settings.api_key_file else "there are no API keys"


def _raw(settings: Settings) -> str | None:
    return "raw gives the prompt to the model as it is" if settings.raw else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one process, resolved; `origin` says where each that is not a default came from.

    `flags` are what `resolve` got, to read environment and file again beside them.
    """

    model: str = setting(
        "",
        "The GGUF to serve (the first file of a split one), or `demo` for the embedded model.",
        commands=_ALL,
        inert=_synth_model,
    )
    device: Literal["auto", "cpu", "cuda", "reference"] = setting(
        "auto",
        "Where the model computes; auto is cuda where a GPU can be used, else cpu; reference is slow NumPy.",
    )
    threads: int = setting(
        0,
        "CPU threads to compute with; 0 is the physical cores, more than those slows the kernels down.",
        short="-t",
        bounds={"ge": 0, "le": 1024},
        inert=_not_on_cpu,
    )
    ctx: int | None = setting(
        None,
        "Tokens of context that may be held at once, shared by all sequences.",
        short="-c",
        default_text="the model's, at most 8192 and what fits",
        bounds={"ge": 16},
    )
    kv_type: Literal["f16", "f32", "q8_0"] = setting(
        "f16", "Element type of the KV cache; f32 is the most exact, q8_0 the smallest (on the CPU only)."
    )
    flash_attn: bool = setting(
        True, "Fused attention, which needs no score matrix; off is the plain reference path.", inert=_not_on_cpu
    )
    chunk: int = setting(
        512,
        "Prompt tokens in one step; larger is faster for long prompts and makes running answers wait longer.",
        bounds={"ge": 1, "le": 8192},
    )
    chat_template: Path | None = setting(
        None,
        "A Jinja file used in place of the model's own chat template.",
        commands=_TEXT,
        parse=readable_file,
        default_text="the model's own",
        inert=_raw,
    )

    expert_cache: ExpertBudget = setting(
        ExpertBudget("auto"),
        "Room for routed experts: a size (8GiB), a number (4000) or share (40%) of them, auto, or off to leave them "
        "to the page cache.",
        parse=parse_budget_or_off,
        metavar="SIZE|off",
    )
    host_cache: ExpertBudget = setting(
        ExpertBudget("auto"),
        "Room in host memory for experts that lose their slot on the GPU, given as for --expert-cache; off keeps none.",
        parse=parse_budget_or_off,
        metavar="SIZE|off",
        inert=_not_on_gpu,
    )
    reader: Literal["auto", "direct", "buffered", "mmap"] = setting(
        "auto", "How experts are read: past the page cache, through it, by mapping, or chosen by what memory there is."
    )
    io_threads: int = setting(
        4, "Reads in flight at once; fast disks want more, more than they need costs CPU.", bounds={"ge": 1, "le": 64}
    )
    lookahead: Literal["on", "off", "auto"] = setting(
        "auto", "Reading the next layer's likely experts while the disk is idle; auto stops where that does not pay."
    )
    draft: Literal["off", "mtp", "mtp-always"] = setting(
        "off",
        "Guessing tokens ahead with the model's own draft layer; mtp stops while that loses, mtp-always never does.",
    )
    draft_tokens: int = setting(
        2,
        "Tokens guessed at once; right ones save steps, wrong ones read experts in vain.",
        bounds={"ge": 1, "le": 7},
        inert=_no_draft,
    )
    stats_every: int = setting(
        16,
        "Steps between two [expert-stream] lines; 0 prints only the last one, as `run` does on a terminal unless told.",
        bounds={"ge": 0},
    )
    stats_json: Path | None = setting(
        None, "A file that gets the final statistics as JSON.", parse=file_to_write, default_text="none"
    )
    trace: Path | None = setting(
        None,
        "A file that records which experts were routed to, for replay; with --lookahead on also what was guessed.",
        parse=file_to_write,
        default_text="none",
    )
    profile: Path | None = setting(
        None,
        "A file that keeps which experts are hot from one run to the next, for a warm start; off keeps none.",
        parse=file_or_off,
        metavar="FILE|off",
        default_text="off",
    )

    max_tokens: int | None = setting(
        None,
        "Most tokens to generate for an answer.",
        commands=_RUN,
        short="-n",
        bounds={"ge": 0},
        default_text="up to the end of the answer or of the context",
    )
    system: str | None = setting(
        None, "System message put before the chat.", commands=_RUN, default_text="none", inert=_raw
    )
    raw: bool = setting(
        False,
        "Give the prompt to the model as it is, without the chat template.",
        commands=_RUN,
        switch=True,
    )
    temperature: float = setting(1.0, "Spread of the sampling; 0 is greedy.", commands=_RUN, bounds={"ge": 0})
    top_k: int = setting(
        0, "Sample among the k most likely tokens; 0 is all.", commands=_RUN, bounds={"ge": 0}, inert=_greedy
    )
    top_p: float = setting(
        1.0,
        "Sample among the likeliest tokens that hold this much probability.",
        commands=_RUN,
        bounds={"gt": 0, "le": 1},
        inert=_greedy,
    )
    min_p: float = setting(
        0.0,
        "Sample among tokens at least this likely beside the likeliest.",
        commands=_RUN,
        bounds={"ge": 0, "le": 1},
        inert=_greedy,
    )
    repeat_penalty: float = setting(
        1.0, "Divides the score of recent tokens; 1 is off.", commands=_RUN, bounds={"gt": 0}
    )
    repeat_last_n: int = setting(
        64,
        "How many recent tokens the penalties look at; -1 is all.",
        commands=_RUN,
        bounds={"ge": -1},
        inert=_no_penalty,
    )
    presence_penalty: float = setting(
        0.0, "Taken from the score of each recent token.", commands=_RUN, bounds={"ge": -2, "le": 2}
    )
    frequency_penalty: float = setting(
        0.0, "Taken from a recent token's score for each time it occurred.", commands=_RUN, bounds={"ge": -2, "le": 2}
    )
    seed: int | None = setting(
        None,
        "Seed of the sampling; the same seed and request give the same answer.",
        commands=_RUN,
        bounds={"ge": 0, "lt": 2**63},
        default_text="random",
        inert=_greedy,
    )
    stop: tuple[str, ...] = setting(
        (), "Text that ends the answer; may be given several times.", commands=_RUN, parse=parse_list
    )
    ignore_eos: bool = setting(False, "Go on past the model's end of answer.", commands=_RUN, switch=True)

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.", commands=_SERVE)
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", commands=_SERVE, bounds={"ge": 0, "le": 65535})
    alias: str | None = setting(None, "Model name that requests use.", commands=_SERVE, default_text="the file's name")
    api_key: tuple[str, ...] = setting(
        (),
        "Key that requests must carry, may be given several times; the environment hides it from process lists.",
        commands=_SERVE,
        parse=parse_list,
        metavar="KEY",
        secret=True,
        default_text="none",
    )
    parallel: int = setting(
        4, "Sequences that are answered at the same time.", commands=_SERVE, bounds={"ge": 1, "le": 256}
    )
    prompt_slowdown: float = setting(
        2.0,
        "How many times longer a step may take for the sake of prompts while answers are running; 0 is without limit.",
        commands=_SERVE,
        bounds={"ge": 0},
    )
    max_queue: int = setting(
        64,
        "Sequences that may wait for a place; a request for more is refused with 429 unless nothing else runs.",
        commands=_SERVE,
        bounds={"ge": 0},
    )
    queue_timeout: float = setting(
        0.0,
        "Seconds that a request may wait before its first step; 0 is without limit.",
        commands=_SERVE,
        bounds={"ge": 0},
    )
    request_timeout: float = setting(
        0.0,
        "Seconds that a request may take in all; 0 is without limit.",
        commands=_SERVE,
        bounds={"ge": 0},
    )
    api_key_file: Path | None = setting(
        None,
        "A file of keys that requests may carry, one a line; # starts a comment.",
        commands=_SERVE,
        parse=readable_file,
        default_text="none",
    )
    key_limit: int = setting(
        0,
        "Requests that one key may have under way at once; 0 is without limit.",
        commands=_SERVE,
        bounds={"ge": 0},
        inert=_no_keys,
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "Origin of a page elsewhere that may use the server from a browser (* is any), may be given several times.",
        commands=_SERVE,
        parse=parse_origins,
        metavar="ORIGIN",
    )
    drain_timeout: float = setting(
        30.0,
        "Seconds that running requests get to end when the server is told to stop.",
        commands=_SERVE,
        bounds={"ge": 0},
    )
    max_body: int = setting(
        32 * 2**20,
        "Largest request body.",
        commands=_SERVE,
        parse=parse_bytes,
        metavar="SIZE",
        default_text="32MiB",
        bounds={"ge": 1024},
    )

    prompt_tokens: int = setting(
        512, "Length of the prompt whose prefill is timed.", commands=_BENCHES, bounds={"ge": 1}, inert=_fed
    )
    decode_tokens: int = setting(64, "Tokens whose decode is timed.", commands=_BENCHES, bounds={"ge": 1}, inert=_fed)
    repetitions: int = setting(
        5,
        "Runs whose median is reported; one more warms up.",
        commands=_BENCH,
        bounds={"ge": 1, "le": 1000},
        inert=_once,
    )
    feed: Path | None = setting(
        None,
        'A JSON file {"prompt": [ids], "decode": [ids]} to feed once, cold, as another engine was fed.',
        commands=_BENCH,
        parse=readable_file,
        default_text="random prompts, greedy decode",
    )

    batch: int = setting(
        1, "Sequences that are run side by side.", commands=_BENCH, bounds={"ge": 1, "le": 256}, inert=_fed
    )
    budgets: tuple[ExpertBudget, ...] = setting(
        (),
        "Values of --expert-cache to compare, a row each (10,25,50 are percent), with controls; like each list here.",
        commands=_BENCH,
        parse=parse_budgets,
        metavar="PERCENT|SIZE,...",
    )
    batches: tuple[int, ...] = setting(
        (), "Values of --batch to compare.", commands=_BENCH, parse=parse_words, metavar="N,..."
    )
    contexts: tuple[int, ...] = setting(
        (), "Values of --prompt-tokens to compare.", commands=_BENCH, parse=parse_words, metavar="N,...", inert=_fed
    )
    readers: tuple[Literal["auto", "direct", "buffered", "mmap"], ...] = setting(
        (), "Values of --reader to compare.", commands=_BENCH, parse=parse_words, metavar="MODE,..."
    )
    lookaheads: tuple[Literal["on", "off", "auto"], ...] = setting(
        (), "Values of --lookahead to compare.", commands=_BENCH, parse=parse_words, metavar="on|off|auto,..."
    )
    drafts: tuple[Literal["off", "mtp", "mtp-always"], ...] = setting(
        (), "Values of --draft to compare.", commands=_BENCH, parse=parse_words, metavar="off|mtp|mtp-always,..."
    )

    page_cache: Literal["any", "cold", "warm"] = setting(
        "any",
        "What of the model's file is cached when a run starts: as it happens to be, nothing (one run, the first of its "
        "process, is timed), or all of it.",
        commands=_BENCH,
    )
    memory_cap: ExpertBudget | None = setting(
        None,
        "Memory each row's process may use, page cache included, as a size or a share of the model's file (50%); "
        "by a control group.",
        commands=_BENCH,
        parse=parse_cap,
        metavar="SIZE|PERCENT",
        default_text="no limit",
    )
    plot: Path | None = setting(
        None,
        "A picture of a comparison's speeds, times and use of experts; needs the extra `plot`.",
        commands=_BENCH,
        parse=file_to_write,
        default_text="none",
    )
    results_csv: Path | None = setting(
        None,
        "A file that gets a line for each row of a comparison.",
        commands=_BENCHES,
        parse=file_to_write,
        default_text="none",
    )
    results_json: Path | None = setting(
        None,
        "A file that gets the last line of a comparison.",
        commands=_BENCHES,
        parse=file_to_write,
        default_text="none",
    )
    synth: str | None = setting(
        None,
        "Make a synthetic model with the shapes of a real one (a name such as qwen3-30b-a3b) and measure that.",
        commands=_BENCH,
        metavar="NAME",
        default_text="none",
    )
    output: Path | None = setting(
        None,
        "Where the synthetic model goes; one that is there already is used.",
        commands=_BENCH,
        short="-o",
        parse=file_to_write,
        default_text="NAME-synthetic.gguf",
        inert=_no_synth,
    )
    layers: int | None = setting(
        None,
        "Layers of the synthetic model; with fewer it is smaller, and its shapes are as they were.",
        commands=_BENCH,
        bounds={"ge": 1},
        default_text="all",
        inert=_no_synth,
    )
    scale: ExpertBudget = setting(
        ExpertBudget("percent", 100),
        "As many layers as come to this share of them (25%) or fit in this size (8GiB).",
        commands=_BENCH,
        parse=parse_scale,
        metavar="PERCENT|SIZE",
        inert=_layers_given,
    )
    skew: Path | None = setting(
        None,
        "A routing trace of --trace; the synthetic model's routers favour experts as much as it does.",
        commands=_BENCH,
        parse=readable_file,
        default_text="that of the embedded model",
        inert=_no_synth,
    )
    synth_seed: int = setting(
        0,
        "Seed of the synthetic model; the same one gives the same file.",
        commands=_BENCH,
        bounds={"ge": 0, "lt": 2**32},
        inert=_no_synth,
    )
    write_only: bool = setting(
        False, "Write the synthetic model and measure nothing.", commands=_BENCH, switch=True, inert=_no_synth
    )

    serve: str | None = setting(
        None,
        "Load a running server, any with OpenAI's API, and time what its clients see; MODEL is then the name that "
        "requests use, by default the first that the server lists.",
        commands=_BENCHES,
        parse=parse_server,
        metavar="URL",
        default_text="none",
    )
    endpoint: Literal["chat", "completions"] = setting("chat", "What the server is asked for.", commands=_LOAD)
    arrival: Literal["closed", "chat"] = setting(
        "closed",
        "How requests come: a number of them is always under way, or conversations start at random moments.",
        commands=_LOAD,
    )
    concurrency: tuple[int, ...] = setting(
        (1, 2, 4, 8),
        "Requests under way at once, a measurement for each.",
        commands=_LOAD,
        parse=parse_counts,
        metavar="N,...",
        default_text="1,2,4,8",
        inert=_chats,
    )
    rate: tuple[float, ...] = setting(
        (1.0,),
        "Conversations that start in a second, a measurement for each.",
        commands=_LOAD,
        parse=parse_rates,
        metavar="X,...",
        default_text="1",
        inert=_no_chats,
    )
    requests: int = setting(32, "Requests of one measurement.", commands=_LOAD, bounds={"ge": 1, "le": 10**6})
    turns: int = setting(
        4,
        "Requests of one conversation; each has all that was said before.",
        commands=_LOAD,
        inert=_no_chats,
        bounds={"ge": 1, "le": 1000},
    )
    think_time: float = setting(
        2.0,
        "Seconds, on the mean, between an answer and the next turn.",
        commands=_LOAD,
        bounds={"ge": 0},
        inert=_no_chats,
    )
    slo_ttft: float = setting(
        2000.0,
        "Milliseconds to its first token that a good answer takes at most; good ones are the goodput.",
        commands=_LOAD,
        bounds={"gt": 0},
    )
    slo_itl: float = setting(
        200.0,
        "Milliseconds between two tokens, on the mean of an answer, that a good one takes at most.",
        commands=_LOAD,
        bounds={"gt": 0},
    )
    token_timeout: float = setting(
        60.0,
        "Seconds without a token after which a request is given up.",
        commands=_LOAD,
        bounds={"gt": 0},
    )
    server_key: str | None = setting(
        None,
        "API key of the server under load; the environment hides it from process lists.",
        commands=_LOAD,
        parse=parse_key,
        metavar="KEY",
        secret=True,
        default_text="none",
    )

    log_format: Literal["text", "json"] = setting("text", "Form of the log lines on standard error.", commands=_ALL)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severity that is logged.", commands=_ALL
    )

    config: Path | None = setting(
        None,
        "A TOML file of settings, weaker than flags and environment.",
        commands=_ALL,
        parse=readable_file,
        default_text="none",
    )
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def loads_server(self, command: str) -> bool:
        """Whether `command` runs no model but sends requests to a server."""
        return command == "bench" and self.serve is not None

    def inert(self, command: str) -> list[str]:
        """One line for each setting that was given and has no effect in `command` as settings stand."""
        command = _LOAD[0] if self.loads_server(command) else command
        lines = []
        for name, source in self.origin.items():
            declared = SETTINGS[name].declared
            if command in declared.commands:
                why = declared.inert(self) if declared.inert else None
            else:
                why = f"`{command}` does not use it"
                why += f", `{_LOAD[0]}` does" if declared.commands == _LOAD else ""
            if why:
                lines.append(f"{source} has no effect: {why}")
        return lines

    def crowded(self) -> str | None:
        """A line where more threads than the CPUs there are were asked to compute."""
        source = self.origin.get("threads")
        if source is None or _not_on_cpu(self) or self.threads <= (cpus := usable_cpus()):
            return None
        return (
            f"{source} {self.threads} is more than the {cpus} CPUs that may be used here; threads beyond them only wait"
        )


SETTINGS = declarations(Settings)


def _refuse_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; docs/ENVIRONMENT.md lists all settings"
            raise ConfigError(f"{where} {name} is not a setting{hint}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--config {path}: is no TOML: {error}") from None
    _refuse_unknown(values, SETTINGS.keys() - {"config"}, f"{path}:")
    return values


def _model(toml: dict[str, Any]) -> type[Any]:
    """The pydantic model of the declarations; built on use because its import takes longer than `--help` may."""
    from pydantic import BeforeValidator, Field, create_model
    from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

    class Layers(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX, enable_decoding=False, extra="forbid", validate_default=False, allow_inf_nan=False
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, toml)

    fields: dict[str, Any] = {}
    for item in SETTINGS.values():
        parse, bounds = item.declared.parse, item.declared.bounds
        kind = Annotated[item.type, BeforeValidator(parse)] if parse else item.type
        fields[item.name] = (kind, Field(default=item.default, **bounds))
    return create_model("SettingsModel", __base__=Layers, **fields)


def _origins(flags: Mapping[str, Any], toml: Mapping[str, Any], file: Path | None) -> dict[str, str]:
    """For each setting that was given, the flag, variable or key that decides it."""
    variables = {name.upper() for name in os.environ}
    origins = {}
    for item in SETTINGS.values():
        if item.name in flags:
            origins[item.name] = "MODEL" if item.name == "model" else item.flag
        elif item.variable in variables:
            origins[item.name] = item.variable
        elif item.name in toml:
            origins[item.name] = f"{file}: {item.name}"
    return origins


def resolve(flags: Mapping[str, Any], *, command: str | None = None) -> Settings:
    """The settings of this process from `flags` (by setting name), the environment and the file that they name.

    A model must be named, but to a `command` that can do without.

    Raises:
        ConfigError: one line that names the flag, variable or key at fault and its value.
    """
    from pydantic import ValidationError

    flags = {name: value for name, value in flags.items() if value is not None}
    names = [name for name in os.environ if name.upper().startswith(ENV_PREFIX)]
    _refuse_unknown((name.upper() for name in names), (s.variable for s in SETTINGS.values()), "environment variable")
    file = flags.get("config", next((os.environ[n] for n in names if n.upper() == f"{ENV_PREFIX}CONFIG"), None))
    path = None if file is None else Path(file).expanduser()
    toml = {} if path is None else _read_toml(path)
    origin = _origins(flags, toml, path)
    try:
        layers = _model(toml)(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        reason = first["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
        value = ",".join(map(str, first["input"])) if isinstance(first["input"], list | tuple) else first["input"]
        shown = "" if SETTINGS[name].declared.secret else f" {value!r}"
        raise ConfigError(f"{origin.get(name, name)}{shown}: {reason}") from None
    values = {name: getattr(layers, name) for name in SETTINGS}
    if not values["model"] and not (command == "bench" and (values["synth"] or values["serve"])):
        raise ConfigError(f"no model named: give MODEL (a GGUF file, or demo), or set {ENV_PREFIX}MODEL")
    values["threads"] = values["threads"] or physical_cores()
    return Settings(**values, origin=origin, flags=flags)


def as_flags(settings: Settings, command: str) -> list[str]:
    """Arguments of `command` that give it these settings where nothing else does."""
    flags = []
    for item in SETTINGS.values():
        value = getattr(settings, item.name)
        if command not in item.declared.commands or value == item.default or item.name in ("model", "config"):
            continue
        if item.declared.switch:
            flags.append(item.flag)
        elif isinstance(value, tuple):
            flags += [part for each in value for part in (item.flag, str(each))]
        else:
            flags += [item.flag, ("on" if value else "off") if isinstance(value, bool) else str(value)]
    return flags


def environment_without_settings() -> dict[str, str]:
    """The environment for a process whose settings are all given as arguments."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}


def prepare_libraries() -> None:
    """Sets the variables that native libraries read when they are loaded; call it before the first of them is."""
    # Without it an abort inside ggml starts a debugger to print a backtrace, which can hang a server for minutes.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    # OpenMP's barriers spin for milliseconds by default: where another process holds a core, each burns a time slice.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Texts are encoded one at a time; a pool of threads for many would only be more threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
