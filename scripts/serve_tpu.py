"""Serves a model on a TPU VM, as on a GPU or a CPU: decides by the chip, says what it decided, and serves.

    python scripts/serve_tpu.py MODEL                              detect, check that it fits, load, warm up, serve
    python scripts/serve_tpu.py MODEL --dry-run --topology v5e-8   print the plan for chips that are not here

It looks for devices in a process that ends, sets what jax reads at its start, checks that weights, state, programs and
pages fit before it loads anything, then does what `jpaged serve` does. Several chips are planned for, not run on:
--chip chooses one of the host's. Exit codes are those of `jpaged`; 2 where the model does not fit.
"""

import json
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from jpaged.accelerators import Topology, parse_topology
from jpaged.cli import options
from jpaged.cli import serve as serve_command
from jpaged.cli.option_names import flags_of, with_flags
from jpaged.cli.serve import ServerOptions
from jpaged.config import EngineConfig, SchedulerConfig
from jpaged.device_probe import probe_devices
from jpaged.division import engine_config
from jpaged.errors import ConfigError, JpagedError, RequestError
from jpaged.launch_settings import Setting, launch_settings
from jpaged.model_configs import config_of
from jpaged.serving_plan import ServingPlan, Wishes, plan_serving
from scripts.plan_text import SEVERAL_CHIPS, plan_text, refusal

_ENGINE: Final = "Engine"
_PLAN: Final = "The plan"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan, as it was asked for on the command line."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and leave.", rich_help_panel=_PLAN)] = False
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            help="With --dry-run: a kind and a number of chips, such as v5e-8, v6e-1, v5p-8, tpu7x-4, h200, cpu.",
            rich_help_panel=_PLAN,
            show_default="what is here",
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print one JSON object.", rich_help_panel=_PLAN)
    ] = False
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel",
            help="Devices that share the model; more than 1 with --dry-run alone.",
            rich_help_panel=_PLAN,
            show_default="all to plan, 1 to run",
        ),
    ] = None
    chip: Annotated[
        int | None,
        typer.Option(
            "--chip", min=0, help="Of the host's TPU chips, the one to run on.", rich_help_panel=_PLAN, show_default="0"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes that the plan chooses unless they are given. Fields as in `Wishes`."""

    dtype: options.Dtype = None
    weights: options.Weights = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="Of K and V, also int8 and float8_e4m3fn; by default that of the weights.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    page_size: options.PageSize = None
    num_pages: options.NumPages = None
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Part of the memory for weights, sampler's state and pages.",
            rich_help_panel=_ENGINE,
            show_default="what the steps leave",
        ),
    ] = None
    max_model_len: options.MaxModelLen = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs", help="Requests that run at once.", rich_help_panel=_ENGINE, show_default="by the memory"
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a step, prefill and decode together.", rich_help_panel=_ENGINE, show_default="by the chip"
        ),
    ] = None
    max_num_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a step in which nobody waits for a next token.",
            rich_help_panel=_ENGINE,
            show_default="on a GPU twice as many, unless sizes of steps are given",
        ),
    ] = None

    token_buckets: serve_command.TokenBuckets = None

    def wishes(self) -> Wishes:
        """Raises ConfigError if the buckets are no list of integers."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Wishes)}
        given["token_buckets"] = serve_command.parsed_buckets(self.token_buckets)
        return Wishes(**given)


_PLAN_DEFAULTS: Final = PlanOptions()
_SIZE_DEFAULTS: Final = SizeOptions()
_SERVER_DEFAULTS: Final = ServerOptions()

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@options.flattened
def serve_tpu(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Known name, folder, .gguf file or Hugging Face id; with --dry-run also llama-3.1-70b and the like.",
        ),
    ] = options.DEFAULT_MODEL,
    models: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="Name in requests; may be repeated.", show_default="MODEL"),
    ] = None,
    plan: PlanOptions = _PLAN_DEFAULTS,
    server: ServerOptions = _SERVER_DEFAULTS,
    sizes: SizeOptions = _SIZE_DEFAULTS,
    prefix_cache: options.PrefixCache = True,
    host_pages: options.HostPages = 0,
    policy: Annotated[
        str, typer.Option(help="Who is served first: fcfs, or priority.", rich_help_panel=_ENGINE)
    ] = "fcfs",
    warmup: Annotated[
        str, typer.Option(help="eager compiles all steps at the start, lazy when they come.", rich_help_panel=_ENGINE)
    ] = "eager",
    speculative_tokens: options.SpeculativeTokens = 0,
    load_format: serve_command.LoadFormat = "auto",
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process/--engine-thread",
            help="A process of its own is restarted if it fails, and never waits for the server.",
            rich_help_panel=_ENGINE,
        ),
    ] = True,
    progress: options.Bars = None,
) -> None:
    """Serve a model on a TPU VM, a GPU or a CPU by OpenAI's API: decide by the chip, say what was decided, and serve.

    With --dry-run the plan is printed, for chips that need not be here.
    """
    try:
        if plan.dry_run:
            _dry_run(model, plan, sizes.wishes())
            return
        served = server.config(models or [model])
        others = EngineChoices(
            prefix_cache=prefix_cache,
            host_pages=host_pages,
            policy=policy,
            warmup=warmup,
            speculative_tokens=speculative_tokens,
            load_format=load_format,
        )
        with serve_command.listener_of(served) as listener:
            recipe = make_recipe(model, plan, sizes, others, progress=progress)
            serve_command.start(served, recipe, listener, load_format=load_format, own_process=engine_process)
    except KeyboardInterrupt:
        print("serve_tpu: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except (JpagedError, NotImplementedError) as error:
        flags = flags_of(typer.main.get_command(app).params)
        print(f"serve_tpu: error: {with_flags(' '.join(str(error).split()), flags)}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None


@dataclass(frozen=True, kw_only=True)
class EngineChoices:
    """What the plan does not decide. Fields as the options."""

    prefix_cache: bool = True
    host_pages: int = 0
    policy: str = "fcfs"
    warmup: str = "eager"
    speculative_tokens: int = 0
    load_format: str = "auto"


def make_recipe(
    model: str, plan: PlanOptions, sizes: SizeOptions, others: EngineChoices, *, progress: bool | None
) -> dict[str, Any]:
    """Decides by what is here, says so, sets the environment, and gives the options of the engine's maker.

    Raises:
      ConfigError: the model does not fit, or an option cannot be meant.
      FetchError: there is no such model.
    """
    _refuse_what_only_plans(plan)
    speculation = options.speculation_of(others.speculative_tokens)
    EngineConfig(scheduler=SchedulerConfig(policy=others.policy), warmup=others.warmup)  # type: ignore[arg-type]  # refuses words
    path = serve_command.find_model(model, others.load_format, progress)
    decided, settings = _decide(model, path, plan, sizes.wishes())
    os.environ.update({one.name: one.value for one in settings})
    config = engine_config(
        decided.chosen,
        warmup=others.warmup,
        policy=others.policy,
        dtype=decided.kv_dtype,
        num_pages=_num_pages(decided, sizes),
        prefix_cache=others.prefix_cache,
        host_pages=others.host_pages,
    )
    config = replace(config, speculation=speculation)
    serve_command.say(plan_text(decided, settings))
    loading = {"dtype": decided.dtype, "weights": decided.weights, "progress": progress}
    return {"model": path, "config": config, **loading}


def _dry_run(model: str, asked: PlanOptions, wishes: Wishes) -> None:
    topology = parse_topology(asked.topology) if asked.topology else probe_devices(os.environ, chip=asked.chip).topology
    plan = plan_serving(model, config_of(model), topology, wishes, degree=asked.tensor_parallel)
    chip = _chip(topology, asked.chip) if plan.chosen.degree == 1 else None
    settings = launch_settings(topology.accelerator.platform, os.environ, chip=chip)
    refused = None if plan.chosen.objection is None else refusal(plan, wishes)
    if asked.as_json:
        print(json.dumps({**plan.as_dict(), "refused": refused, "environment": [vars(one) for one in settings]}))
    else:
        print(plan_text(plan, settings))
    if refused is not None:
        raise ConfigError(refused)


def _refuse_what_only_plans(asked: PlanOptions) -> None:
    if (asked.tensor_parallel or 1) != 1:
        raise ConfigError(f"tensor_parallel is {asked.tensor_parallel}, expected 1: {SEVERAL_CHIPS} (--dry-run)")
    for name, given in (("topology", asked.topology is not None), ("json", asked.as_json)):
        if given:
            raise ConfigError(f"--{name} goes with --dry-run; a server runs on what is here")


def _decide(model: str, path: str, asked: PlanOptions, wishes: Wishes) -> tuple[ServingPlan, list[Setting]]:
    """The plan for the device that is here.

    Raises:
      ConfigError: the model does not fit.
    """
    topology = probe_devices(os.environ, chip=asked.chip).topology
    plan = plan_serving(model, config_of(path), topology, wishes, degree=1)
    settings = launch_settings(topology.accelerator.platform, os.environ, chip=_chip(topology, asked.chip))
    if plan.chosen.objection is not None:
        serve_command.say(plan_text(plan))
        raise ConfigError(refusal(plan, wishes))
    return plan, settings


def _chip(topology: Topology, asked: int | None) -> int | None:
    return asked if asked is not None or topology.num_chips == 1 else 0


def _num_pages(plan: ServingPlan, sizes: SizeOptions) -> int | None:
    """On a device, `None` fills what it says is free. Others take of host memory too: there the plan is kept."""
    return plan.chosen.num_pages if plan.topology.accelerator.platform == "cpu" else sizes.num_pages


if __name__ == "__main__":
    app(prog_name="serve_tpu.py")
