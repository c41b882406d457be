"""What `bench` measured, as a line per cell, and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from structkv_bench.bench.measure import Length, Measured
from structkv_bench.bench.peak import KINDS
from structkv_bench.bench.timing import Spread
from structkv_bench.cost.work import cost
from structkv_bench.engine.prefill import PARTS
from structkv_bench.methods.full import Full
from structkv_bench.provenance import provenance
from structkv_bench.report.naming import kv_ratio, method_label
from structkv_bench.report.render import Format, Grid, grid_text, lines_text

Line = dict[str, Any]

DEFINITIONS = {
    "length": "tokens of prompt plus answer room, as in a run; prompt_tokens is the prompt alone",
    "prefill_s": "wall time from token ids to the logits after the last of them, choices included",
    "first_token_s": "prefill_s and the choice of the first token",
    "decode_s_per_token": "mean over the tokens after the first; packing the cache for decode is part of it",
    "peak_bytes": "the largest memory of prefill and decode, weights included; peak_of says whose",
    "kept_bytes": "measured K and V after the prompt",
    "parts_s": "where the prefill's time goes; what is left out of them is the embedding and the head",
    "possible_speedup": "FLOPs of full's layers and head over the method's, its scoring left out",
    "achieved_speedup": "full's prefill_s over the method's, on the same prompt",
    "share_reached": "achieved_speedup over possible_speedup",
    "spread": "median, and quartiles q1 and q3, over the repeats",
}
TIMES = ["method", "KV", "length", "prompt", "prefill s", "first token s", "decode ms/token", "peak MiB",
         "kept MiB", "kept %"]  # fmt: skip
PREFILL = ["method", "KV", "length", *(f"{part} %" for part in PARTS), "TFLOP", "possible", "achieved",
           "reached %"]  # fmt: skip
GROUPS = ["length", "cells", "group s", "one by one s", "times as fast", "over full"]
MEBI = 2**20


def lines(found: Length) -> list[Line]:
    """A line per cell; None where there is nothing to say."""
    full = next((one for one in found.alone if one.cells[0].method_name == "full"), None)
    return [_line(found, one, full) for one in found.alone]


def _line(found: Length, one: Measured, full: Measured | None) -> Line:
    [cell] = one.cells
    about = {"config": cell.config, "names": cell.names}
    line: Line = {
        "model": cell.model.name,
        "method": method_label(about),
        "kv_ratio": kv_ratio(about),
        "subtask": cell.subtask,
        "length": cell.length,
        "repeats": len(one.times),
        "distinct_prompts": found.distinct_prompts,
        "error": one.error,
    }
    if not one.times:
        return line
    kept = [time.kept_bytes for time in one.times]
    whole = [found.shape.kv_bytes([tokens] * found.shape.layers) for tokens in one.prompt_tokens]
    per_token = [time.decode_s_per_token for time in one.times if time.decode_s_per_token is not None]
    return line | {
        "prompt_tokens": int(median(one.prompt_tokens)),
        "prefill_s": _spread(time.prefill_s for time in one.times),
        "first_token_s": _spread(time.first_token_s for time in one.times),
        "decode_s_per_token": _spread(per_token) if per_token else None,
        "peak_bytes": one.peak_bytes,
        "peak_of": KINDS[found.device.partition(":")[0]],
        "estimated_peak_bytes": int(median(own.peak_bytes for own in one.costs)),
        "kept_bytes": int(median(kept)),
        "kv_bytes_pct": median(100 * some / all for some, all in zip(kept, whole, strict=True)),
        "parts_s": {part: median(time.parts.get(part, 0.0) for time in one.times) for part in PARTS},
        "pivots": [time.pivot for time in one.times],
        **_speedups(found, one, full),
    }


def _speedups(found: Length, one: Measured, full: Measured | None) -> Line:
    """What the FLOPs of the layers allow, and what the clock shows."""
    allowed = [
        cost(found.shape, Full(), tokens).forward / own.forward
        for tokens, own in zip(one.prompt_tokens, one.costs, strict=True)
    ]
    line: Line = {
        "prefill_flops": int(median(own.prefill_flops for own in one.costs)),
        "possible_speedup": median(allowed),
        "achieved_speedup": None,
        "share_reached": None,
    }
    if full is not None and full.times:
        pairs = zip(full.times, one.times, strict=False)
        achieved = [whole.prefill_s / own.prefill_s for whole, own in pairs]
        shares = [got / could for got, could in zip(achieved, allowed, strict=False)]
        line |= {"achieved_speedup": _spread(achieved), "share_reached": _spread(shares)}
    return line


def group_line(found: Length) -> Line | None:
    """The whole grid as one group beside the sum of its cells alone; None: it was not timed."""
    group = found.group
    if group is None:
        return None
    line: Line = {"length": group.cells[0].length, "cells": len(group.cells), "error": group.error}
    if not group.times or any(one.error for one in found.alone):
        return line
    seconds = [time.seconds for time in group.times]
    sums = [sum(one.times[i].seconds for one in found.alone) for i in range(len(seconds))]
    line |= {
        "group_s": _spread(seconds),
        "one_by_one_s": _spread(sums),
        "times_as_fast": _spread(alone / own for alone, own in zip(sums, seconds, strict=True)),
        "peak_bytes": group.peak_bytes,
    }
    full = next((one for one in found.alone if one.cells[0].method_name == "full"), None)
    if full is not None:
        pairs = zip(seconds, full.times, strict=True)
        line["over_full"] = _spread(own / whole.seconds for own, whole in pairs)
    return line


def _spread(values: Any) -> dict[str, float]:
    return asdict(Spread.of(values))


def rendered(found: Sequence[Length], format: Format, width: int | None = None) -> str:
    """All lengths in one text."""
    every = [line for one in found for line in lines(one)]
    groups = [line for one in found if (line := group_line(one)) is not None]
    if format is Format.JSON:
        about = {key: value for key, value in provenance(found[0].device).items() if key != "host"}
        whole = {"definitions": DEFINITIONS, "lines": every, "groups": groups, "provenance": about}
        return json.dumps(whole, ensure_ascii=False, indent=2)
    if format is Format.CSV:
        flat = [dict(_flat(line)) for line in every]
        columns = max(flat, key=len)
        return lines_text([{name: line.get(name) for name in columns} for line in flat], format)
    grids = [_times(every), _prefill(every), *([_group_grid(groups)] if groups else [])]
    return "\n\n".join(grid_text(grid, format, width) for grid in grids)


def _flat(line: Line) -> Iterator[tuple[str, Any]]:
    """A median under its own name; quartiles and parts beside it."""
    for name, value in line.items():
        if not isinstance(value, dict):
            yield name, " ".join(map(str, value)) if isinstance(value, list) else value
        for key, number in value.items() if isinstance(value, dict) else ():
            yield name if key == "median" else f"{name}_{key}", number


def _times(every: Sequence[Line]) -> Grid:
    rows = [[*_name(line), *(_measures(line) if line["repeats"] else [""] * 7)] for line in every]
    seen = [line for line in every if line["repeats"]]
    notes = [f"{line['method']} at {line['length']}: {line['error']}" for line in every if line["error"]]
    if seen:
        notes += [
            f"{len(seen[0]['pivots'])} repeats on {seen[0]['distinct_prompts']} prompts: median (quartiles); "
            f"peak: {seen[0]['peak_of']}, weights included; packing the cache is part of decode"
        ]
    return Grid(TIMES, rows, ("method",), "", notes)


def _name(line: Line) -> list[str]:
    return [line["method"], str(line["kv_ratio"] or ""), str(line["length"])]


def _measures(line: Line) -> list[str]:
    per_token = line["decode_s_per_token"]
    return [
        str(line["prompt_tokens"]),
        _shown(line["prefill_s"]),
        _shown(line["first_token_s"]),
        _shown(per_token, 1000) if per_token else "",
        f"{line['peak_bytes'] / MEBI:.1f}",
        f"{line['kept_bytes'] / MEBI:.2f}",
        f"{line['kv_bytes_pct']:.2f}",
    ]


def _prefill(every: Sequence[Line]) -> Grid:
    rows = [[*_name(line), *_breakdown(line)] for line in every if line["repeats"]]
    note = "possible: FLOPs of full's layers over its own at its pivot; achieved: full's seconds over its own"
    return Grid(PREFILL, rows, ("method",), "", [note])


def _breakdown(line: Line) -> list[str]:
    seconds, achieved = line["prefill_s"]["median"], line["achieved_speedup"]
    return [
        *(f"{100 * line['parts_s'][part] / seconds:.1f}" for part in PARTS),
        f"{line['prefill_flops'] / 1e12:.3g}",
        f"{line['possible_speedup']:.3f}",
        _shown(achieved) if achieved else "",
        f"{100 * line['share_reached']['median']:.1f}" if achieved else "",
    ]


def _group_grid(groups: Sequence[Line]) -> Grid:
    names = ("group_s", "one_by_one_s", "times_as_fast", "over_full")
    rows = [
        [
            str(line["length"]),
            str(line["cells"]),
            *(_shown(line[name]) if name in line else "" for name in names),
        ]
        for line in groups
    ]
    notes = [f"group at {line['length']}: {line['error']}" for line in groups if line["error"]]
    return Grid(GROUPS, rows, (), "", notes)


def _shown(spread: dict[str, float], times: float = 1) -> str:
    middle, low, high = (times * spread[name] for name in ("median", "q1", "q3"))
    return f"{middle:.4g} ({low:.4g}-{high:.4g})"
