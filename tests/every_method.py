"""Every config in conf/method/: a new method enters the test matrices by existing."""

from __future__ import annotations

from dataclasses import fields, replace

from structkv_bench.calibrate.file import Calibration
from structkv_bench.calibrate.method import Calibrated
from structkv_bench.catalog import choices
from structkv_bench.config import compose
from structkv_bench.engine.method import Method

LEARNED = {
    "compresskv": {
        "heads": [[5, 0, 3, 7, 6, 1, 2, 4], [2, 6, 7, 1, 0, 3, 4, 5], [*range(8)], [7, 1, 4, 2, 0, 6, 5, 3]],
        "errors": [0.1, 0.45, 0.3, 0.15],
    },
    "sgdkv": {"scores": [[0.3, 0.02], [0.08, 0.1], [0.05, 0.15], [0.2, 0.1]]},
    "headwisekv": {
        "ladder": [16, 8, 4, 2, 1],
        "windows": {
            sinks: [
                {"tau": 0.5, "rungs": ["00", "00", "00", "00"]},
                {"tau": 0.9, "rungs": ["04", "10", "00", "01"]},
                {"tau": 0.99, "rungs": ["24", "42", "14", "30"]},
            ]
            for sinks in ("0", "4")
        },
    },
}
"""What a calibration of the tiny models might have found: unequal layers and heads."""


def calibrated(method: Method, layers: int = 4) -> Method:
    """The method as after a calibration of a tiny model, if it needs one."""
    if not isinstance(method, Calibrated):
        return method
    model = {"name": "tiny", "weights": "w", "tokenizer": "t", "layers": layers}
    content = {"version": 1, "method": method.name, "model": model, "values": LEARNED[method.name]}
    return replace(method, calibration_sha256=Calibration(content))


EVERY = {name: calibrated(compose([f"method={name}"])[0].method) for name in choices("method")}
BUDGETED = {name: method for name, method in EVERY.items() if "budget" in {f.name for f in fields(method)}}
SHORT = {"kv_ratio": 0.3, "struct_ratio": 0.5, "tsp_ratio": 0.5, "min_context": 8, "window": 8}
"""So much of a prompt of 60 tokens, so that each method has something to choose beside its window."""
WHOLE = {"struct_ratio": 1.0, "tsp_ratio": 1.0}
"""No method drops tokens on their way."""


def but(method: Method, **settings: object) -> Method:
    """The method with those of `settings` that it has."""
    known = {field.name for field in fields(method)}
    return replace(method, **{name: value for name, value in settings.items() if name in known})
