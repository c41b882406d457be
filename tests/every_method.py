"""Every config in conf/method/: a new method enters the test matrices by existing."""

from __future__ import annotations

from dataclasses import fields, replace

from structkv_bench.catalog import choices
from structkv_bench.config import compose
from structkv_bench.engine.method import Method

EVERY = {name: compose([f"method={name}"])[0].method for name in choices("method")}
BUDGETED = {name: method for name, method in EVERY.items() if "budget" in {f.name for f in fields(method)}}
SHORT = {"kv_ratio": 0.3, "struct_ratio": 0.5, "tsp_ratio": 0.5, "min_context": 8, "window": 8}
"""So much of a prompt of 60 tokens, so that each method has something to choose beside its window."""
WHOLE = {"struct_ratio": 1.0, "tsp_ratio": 1.0}
"""No method drops tokens on their way."""


def but(method: Method, **settings: object) -> Method:
    """The method with those of `settings` that it has."""
    known = {field.name for field in fields(method)}
    return replace(method, **{name: value for name, value in settings.items() if name in known})
