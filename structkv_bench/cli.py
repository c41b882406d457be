"""The command line: parse, call one function, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from structkv_bench import tracking
from structkv_bench.bench.command import bench
from structkv_bench.calibrate.command import calibrate
from structkv_bench.errors import UserError, one_line
from structkv_bench.gate.command import ToWandb, regress
from structkv_bench.launch.command import status, work
from structkv_bench.launch.settings import HERE
from structkv_bench.report.command import figure, print_results, report, say_results, table
from structkv_bench.report.render import Format, lines_text
from structkv_bench.starting import uncollected
from structkv_bench.tracking import Wandb

if TYPE_CHECKING:
    from structkv_bench.task import PromptFormat

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# typer does not name this class, and some versions bring their own copy of click
UsageError = cast(type[Any], typer.BadParameter.__base__)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="model, method, task or experiment by name, or a setting of one, such as method.kv_ratio=0.1; "
        "a comma list runs every value.",
    ),
]


class Suite(StrEnum):
    """Whose predictions can be scored."""

    LONGBENCH = "longbench"
    RUNS = "runs"


class DataSuite(StrEnum):
    """Whose data files can be written."""

    RULER = "ruler"


class Listing(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    TASKS = "tasks"
    MODELS = "models"
    PROTOCOLS = "protocols"
    EXPERIMENTS = "experiments"
    LAUNCHERS = "launchers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 and one line for a mistake in what was asked for."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(given or ["--help"], prog_name="structkv-bench", standalone_mode=False) or 0
    except UserError as error:
        return _fail(str(error), 2)
    except UsageError as error:
        return _fail(error.format_message(), 2)
    except OSError as error:  # a full disk, a folder without permission: somewhere outside the results
        return _fail(str(error), 2)
    return (
        _fail("interrupted; the same command goes on where this stopped", 130) if code == 130 else int(code)
    )


def _fail(message: str, code: int) -> int:
    line = one_line(message)
    print(line if code == 130 else f"error: {line}", file=sys.stderr)
    return code


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("structkv-bench"))
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Benchmark methods that compress the KV cache of long-context language models."""


@app.command()
def run(overrides: Overrides = None, wandb: ToWandb = Wandb.DISABLED) -> None:
    """Run what has no result yet, and print the table.

    An interrupted run goes on where it stopped; failed samples are tried again.
    """
    with uncollected():
        from structkv_bench.config import compose
        from structkv_bench.plan import plan

        setups = compose(overrides or [])
        tracking.check(wandb)
        keys = [cell.key for group in plan(setups) for cell in group.cells]
        if is_here := setups[0].launcher == HERE:
            from structkv_bench import runner  # only now: it imports transformers
    if is_here:
        failed: int | None = runner.run(setups)
    else:
        from structkv_bench.launch import start as launch

        failed = launch.run(setups, overrides or [])
    if failed is None:
        return
    say_results([setups[0].results_dir], Format.TABLE, keys)
    tracking.log_results(setups, wandb)
    raise typer.Exit(1 if failed else 0)


@app.command()
def show(
    overrides: Overrides = None,
    sample: Annotated[int, typer.Option(help="Which sample, from 0.")] = 0,
    answer: Annotated[str | None, typer.Option(help="Score this text as if the model had said it.")] = None,
    device: Annotated[
        str, typer.Option(help="Whose speed times are for: here, a100, h100, h200, l40s, or FLOP/s,bytes/s.")
    ] = "here",
) -> None:
    """Print what a run would do.

    The composed config, one rendered prompt, its tokens, the budget per layer and the estimated work. Of a
    model or texts that are not here the estimates alone.
    """
    with uncollected():
        from structkv_bench.config import compose

        setups = compose(overrides or [])
        from structkv_bench.show import show as pages

    print(pages(setups, sample, answer, device))


@app.command()
def fetch(overrides: Overrides = None) -> None:
    """Bring the models and texts of a run into the caches, on a machine that has network."""
    from structkv_bench.config import compose

    setups = compose(overrides or [])
    from structkv_bench import models

    for spec in dict.fromkeys(setup.model for setup in setups):
        print(f"{spec.name}: {models.fetch(spec)}")
    for name, task in {setup.task_name: setup.task for setup in setups}.items():
        for path in task.fetch():
            print(f"{name}: {path}")


@app.command("list")
def list_choices(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List what can be run, with a line about each."""
    from structkv_bench.catalog import described

    lines = described(what.removesuffix("s"))
    width = max((len(name) for name, _ in lines), default=0)
    for name, description in lines:
        print(f"{name:<{width}}  {description}".rstrip())


app.command("results")(print_results)
app.command()(table)
app.command()(figure)
app.command()(report)
app.command()(bench)
app.command()(calibrate)
app.command()(regress)
app.command()(status)
app.command(hidden=True)(work)


@app.command()
def provenance(
    run: Annotated[Path, typer.Argument(help="Results folder, or the folder of one of its cells.")],
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Print the commands that make the cells again.")
    ] = False,
    into: Annotated[str, typer.Option(help="Where these put their results.")] = "results/rerun",
) -> None:
    """Print what made the rows of a run: settings, code, versions, machine, hashes and times."""
    from structkv_bench import origin

    cells = origin.read_run(run)
    if not rerun:
        print(origin.as_text(cells))
        return
    from structkv_bench.rerun import again, cautions

    found = again(cells, into)
    for line in (*cautions(cells), *found.refused):
        print(line, file=sys.stderr)
    for command in found.commands:
        print(command)
    raise typer.Exit(1 if found.refused else 0)


@app.command()
def score(
    suite: Annotated[Suite, typer.Argument(help="What to score.")],
    predictions: Annotated[Path, typer.Argument(help="Folder of official prediction files, or of results.")],
    e: Annotated[bool, typer.Option("--e", help="The files are of LongBench-E, as in pred_e/.")] = False,
) -> None:
    """Score prediction files of the official code (JSON, task -> score), or stored rows anew."""
    if suite is Suite.RUNS:
        from structkv_bench.rescore import rescored_lines

        print(lines_text(rescored_lines(predictions), Format.CSV))
        return
    from structkv_bench.tasks.longbench.official import scored

    found = scored(predictions, by_length=e)
    print(json.dumps(found.scores, ensure_ascii=False, indent=4))
    for shortfall in found.shortfalls:
        print(shortfall, file=sys.stderr)


@app.command()
def data(
    suite: Annotated[DataSuite, typer.Argument(help="Which suite.")],
    task: Annotated[str, typer.Option(help="One of the suite's tasks.")],
    length: Annotated[int, typer.Option(help="Tokens of prompt and answer room.")],
    out: Annotated[Path, typer.Option(help="The jsonl file to write.")],
    samples: Annotated[int, typer.Option(help="How many.")] = 500,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 42,
    fit: Annotated[str, typer.Option(help="upstream or tight.")] = "upstream",
    tokenizer: Annotated[
        str, typer.Option(help="A model's name, a folder, or words: no model at all.")
    ] = "words",
    essays: Annotated[str | None, typer.Option(help="File or folder of essays.")] = None,
    squad: Annotated[str | None, typer.Option(help="SQuAD's JSON.")] = None,
    hotpot: Annotated[str | None, typer.Option(help="HotpotQA's JSON.")] = None,
) -> None:
    """Write a suite's samples in its official layout."""
    from structkv_bench.tasks.ruler.official import WordsFormat, write_official
    from structkv_bench.tasks.ruler.suite import Ruler

    ruler = Ruler([length], samples, [task], seed, fit, essays, squad, hotpot)
    write_official(ruler, task, length, WordsFormat() if tokenizer == "words" else _prompts(tokenizer), out)


def _prompts(tokenizer: str) -> PromptFormat:
    """The tokenizer of a configured model, a folder or a hub id."""
    from structkv_bench.catalog import choices
    from structkv_bench.config import compose

    known = tokenizer in choices("model")
    chosen = [f"model={tokenizer}"] if known else ["model=custom", f"model.path={tokenizer}"]
    [setup] = compose([*chosen, "method=full"])
    from structkv_bench import models

    return models.inspect(setup.model).prompts
