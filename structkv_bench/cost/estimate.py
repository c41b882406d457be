"""What cells would take, as `show` prints it: FLOPs, bytes, peak memory and time, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from structkv_bench.calibrate.method import Calibrated
from structkv_bench.cost.sharing import group_line
from structkv_bench.cost.speed import Device
from structkv_bench.cost.work import Cost, cost
from structkv_bench.engine.method import Method
from structkv_bench.errors import UserError
from structkv_bench.methods.full import Full
from structkv_bench.plan import Cell, Group
from structkv_bench.report.naming import kv_ratio, method_label
from structkv_bench.report.render import Grid, text
from structkv_bench.shape import ModelShape

HEAD = ["method", "KV", "prefill TFLOP", "% of full", "scoring %", "decode GFLOP", "read MiB", "cache MiB",
        "peak GiB", "prefill s", "decode ms"]  # fmt: skip
NOTE = (
    "At most, where a method finds its layer in the pass itself. decode and read: one token right after the "
    "prompt; peak: weights, a layer's work and the cache, the method alone. Times are those of the FLOPs and "
    "bytes at the full speed of"
)


def cell_lines(cell: Cell, tokens: int, shape: ModelShape, device: Device) -> list[str]:
    """The estimates of one cell on a prompt of `tokens`, a line each."""
    own, full = _cost(cell, tokens, shape), cost(shape, Full(), tokens)
    scoring = f", {100 * own.scoring / own.prefill_flops:.1f} % of it scoring" if own.scoring else ""
    return [
        f"estimated prefill: {own.prefill_flops / 1e12:.2f} TFLOP, "
        f"{100 * own.prefill_flops / full.prefill_flops:.1f} % of full{scoring}",
        f"estimated decode:  {own.decode_flops / 1e9:.2f} GFLOP a token, "
        f"{own.decode_bytes / 2**20:.0f} MiB read",
        f"estimated cache:   {own.kept_bytes / 2**20:.1f} MiB, "
        f"{100 * own.kept_bytes / full.kept_bytes:.1f} % of full",
        f"estimated peak:    {own.peak_bytes / 2**30:.2f} GiB, "
        f"{own.weight_bytes / 2**30:.2f} of them weights",
        f"estimated time:    {_short(own.prefill_seconds(device))} s of prefill, "
        f"{_short(1000 * own.decode_seconds(device))} ms a decoded token, at the full speed of {device}",
    ]


def table(groups: Sequence[Group], shape: ModelShape, device: Device, why: str) -> str:
    """The estimates of groups with equal cells and length, where there is no prompt to be had.

    Raises:
        UserError: a method can't work on a prompt of this length.
    """
    cells, tokens = groups[0].cells, groups[0].length
    full = cost(shape, Full(), tokens)
    names = dict.fromkeys(group.subtask for group in groups)
    of = f"{cells[0].model.name} on {', '.join(names)}"
    title = f"=== {of}: estimates for a prompt of {tokens} tokens ===\n{why}"
    rows = [_row(cell, _cost(cell, tokens, shape), full, device) for cell in cells]
    notes = [f"{NOTE} {device}"]
    if len(cells) > 1:
        notes.insert(0, group_line(shape, [cell.method for cell in cells], tokens))
    return text(Grid(HEAD, rows, ("method",), title, notes))


def _row(cell: Cell, own: Cost, full: Cost, device: Device) -> list[str]:
    about = {"config": cell.config, "names": cell.names}
    return [
        method_label(about),
        str(kv_ratio(about) or ""),
        f"{own.prefill_flops / 1e12:.4g}",
        f"{100 * own.prefill_flops / full.prefill_flops:.1f}",
        f"{100 * own.scoring / own.prefill_flops:.1f}",
        f"{own.decode_flops / 1e9:.4g}",
        f"{own.decode_bytes / 2**20:.0f}",
        f"{own.kept_bytes / 2**20:.1f}",
        f"{own.peak_bytes / 2**30:.2f}",
        _short(own.prefill_seconds(device)),
        _short(1000 * own.decode_seconds(device)),
    ]


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def _cost(cell: Cell, tokens: int, shape: ModelShape) -> Cost:
    try:
        if not _is_to_be_calibrated(cell.method):
            cell.method.compressor(tokens, shape.layers)  # refuses here what a run would refuse
        return cost(shape, cell.method, tokens)
    except UserError as error:
        raise UserError(f"{cell.method_name} at {tokens} tokens: {error}") from error


def _is_to_be_calibrated(method: Method) -> bool:
    """Whether it has no file yet, and none was named: what it would keep on average is known."""
    return isinstance(method, Calibrated) and not method.is_calibrated and method.calibration is None
