"""Column sums of the softmax in two passes, as Triton kernels: for CUDA, and for Triton's interpreter.

    pass 1, per block of queries: streams over the keys     L_t = log sum over j of exp(l_tj)
    pass 2, per block of keys: streams over the queries     s_j = sum over t of u_t exp(l_tj - L_t)

with l_tj = scaling q_t k_j where t sees j, and u the queries' weights. Both passes take the product q k; in
return no score ever leaves the chip, where torch's form writes and reads each several times. Products are
rounded to the model's dtype, as torch rounds them, so that the two forms choose the same entries; everything
after that is fp32.
"""
# Triton's compiler reads the source of the functions below and knows no types but its own:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structkv_bench.engine.attending import Attending, query_weights

BLOCK = 64
"""Queries, and keys, of a tile; not tuned."""
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def in_two_passes(given: Attending, first: int, newest_weight: float) -> Tensor:
    """The sums of `column_sums`: [heads, tokens], fp32.

    Raises:
        Exception: whatever Triton's compiler or the driver raises.
    """
    query, key, queries = given.query, given.key, given.tokens - first
    heads, tokens, head_dim = query.shape
    dtype = DTYPES[query.dtype]
    if not query.is_cuda:  # the interpreter takes the bits of a bfloat16 for an integer when it multiplies
        query, key = query.float(), key.float()
    totals = torch.empty(heads, queries, device=query.device)
    sums = torch.empty(heads, tokens, device=query.device)
    weights = query_weights(given, first, newest_weight)
    inputs = (query, key, given.positions, *query.stride(), *key.stride(), heads // key.shape[0])
    numbers = (given.scaling, first, tokens, given.sliding_window or 0)
    padded = max(16, triton.next_power_of_2(head_dim))
    sizes = {"HEAD_DIM": head_dim, "PADDED": padded, "BLOCK": BLOCK, "DTYPE": dtype}
    with torch.cuda.device_of(query):  # the layers of a model may lie on several
        _log_sums[(triton.cdiv(queries, BLOCK), heads)](*inputs, *numbers, totals, **sizes)
        _key_sums[(triton.cdiv(tokens, BLOCK), heads)](*inputs, *numbers, totals, weights, sums, **sizes)
    return sums


_VARYING = ["first", "tokens"]
"""Numbers that change from prompt to prompt: not worth a kernel of their own."""


@triton.jit(do_not_specialize=_VARYING)
def _log_sums(
    query, key, positions,
    query_head, query_token, query_dim, key_head, key_token, key_dim, group,
    scaling, first, tokens, window,
    totals,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pass 1: the log of each query's sum, for one head and one block of queries."""
    head = tl.program_id(1).to(tl.int64)
    start = first + tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    q = _tile(query + head * query_head, rows, query_token, query_dim, tokens, HEAD_DIM, PADDED)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for column in range(0, tl.minimum(start + BLOCK, tokens), BLOCK):
        columns = column + tl.arange(0, BLOCK)
        k = _tile(key + head // group * key_head, columns, key_token, key_dim, tokens, HEAD_DIM, PADDED)
        logits = _logits(q, k, rows, columns, positions, scaling, tokens, window, DTYPE)
        highest = tl.maximum(largest, tl.max(logits, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)  # a row that has seen no key yet
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        largest = highest
    log_sums = largest + tl.log(total)
    tl.store(totals + head * (tokens - first) + rows - first, log_sums, mask=rows < tokens)


@triton.jit(do_not_specialize=_VARYING)
def _key_sums(
    query, key, positions,
    query_head, query_token, query_dim, key_head, key_token, key_dim, group,
    scaling, first, tokens, window,
    totals, weights, sums,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pass 2: what each key receives, for one head and one block of keys."""
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK
    columns = column + tl.arange(0, BLOCK)
    k = _tile(key + head // group * key_head, columns, key_token, key_dim, tokens, HEAD_DIM, PADDED)
    received = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.maximum(first, column), tokens, BLOCK):  # queries before see none of these keys
        rows = start + tl.arange(0, BLOCK)
        q = _tile(query + head * query_head, rows, query_token, query_dim, tokens, HEAD_DIM, PADDED)
        logits = _logits(q, k, rows, columns, positions, scaling, tokens, window, DTYPE)
        log_sums = tl.load(totals + head * (tokens - first) + rows - first, mask=rows < tokens, other=0.0)
        weight = tl.load(weights + rows - first, mask=rows < tokens, other=0.0)
        received += tl.sum(tl.exp(logits - log_sums[:, None]) * weight[:, None], 0)
    tl.store(sums + head * tokens + columns, received, mask=columns < tokens)


@triton.jit
def _tile(start, rows, token, dim, tokens, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Vectors of some tokens, [BLOCK, PADDED], zero beyond the last token and the head's width."""
    dims = tl.arange(0, PADDED)
    inside = (rows < tokens)[:, None] & (dims < HEAD_DIM)[None]
    return tl.load(start + rows.to(tl.int64)[:, None] * token + dims[None] * dim, mask=inside, other=0.0)


@triton.jit
def _logits(q, k, rows, columns, positions, scaling, tokens, window, DTYPE: tl.constexpr):
    """Scaled products [queries, keys], fp32, -inf where a query does not see a key; rounded as torch does."""
    products = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    logits = products.to(DTYPE).to(tl.float32)
    seen = columns <= rows[:, None]  # positions ascend with the tokens' order
    if window > 0:
        at = tl.load(positions + rows, mask=rows < tokens, other=0)
        keys_at = tl.load(positions + columns, mask=columns < tokens, other=0)
        seen = seen & (keys_at > at[:, None] - window)
    return tl.where(seen, logits, -float("inf"))
