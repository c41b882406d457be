"""The command of the regression gate."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from structkv_bench import tracking
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.paths import write_whole
from structkv_bench.tracking import Wandb

ToWandb = Annotated[
    Wandb, typer.Option("--wandb", help="Whether Weights & Biases gets the results too, when all is done.")
]


class VerdictFormat(StrEnum):
    """How a verdict is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    JUNIT = "junit"


def regress(
    baseline: Annotated[Path, typer.Option(help="Baseline file, or a results folder.")],
    current: Annotated[Path, typer.Option(help="Results folder, or a baseline file.")] = Path("results/runs"),
    format: Annotated[VerdictFormat, typer.Option(help="How to print the verdict.")] = VerdictFormat.TEXT,
    out: Annotated[Path | None, typer.Option(help="Where to; the terminal then gets it as text.")] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(help="tie_margin=LOGITS, slower=TIMES or METRIC=POINTS; give it again for several."),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the current results as the new baseline.")
    ] = False,
    wandb: ToWandb = Wandb.DISABLED,
) -> None:
    """Hold results to a baseline, sample by sample.

    Ends with 1 if anything regressed, and with 2 if the two can't be compared.
    """
    from structkv_bench.gate.baseline import read, write
    from structkv_bench.gate.regress import Tolerances, gate
    from structkv_bench.gate.verdict import rendered

    tolerances = Tolerances.parse(tolerance or [])
    if update_baseline:
        results = read(current)
        write(baseline, results)
        print(f"{baseline}: {len(results.cells)} cells, {results.samples} samples")
        return
    tracking.check(wandb)
    try:
        verdict = gate(read(baseline), read(current), tolerances)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{baseline} and {current}: a row of one of them is damaged ({kind_and_line(error)})"
        ) from error
    if out:
        write_whole(out, rendered(verdict, format) + "\n")
    print(rendered(verdict, VerdictFormat.TEXT if out else format))
    tracking.log_verdict(verdict, current if current.is_dir() else Path(), wandb)
    raise typer.Exit(verdict.exit_code)
