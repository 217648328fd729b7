"""Each C kernel against its plain PyTorch reference, and the law that exactness rests on: a row's result is the row's
own, bit for bit, however many rows come with it and whatever lies in slots that it may not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.models import attention, layers, linear
from outrider.models.attention import GROUP, Batch, Heads, LayerCache, attend, fits_kernels, rope_store
from outrider.models.layers import (
    RMSNorm,
    gelu_mul,
    reference_gelu_mul,
    reference_rms_norm,
    reference_silu_mul,
    rope_tables,
    row_writer,
    silu_mul,
    take_rows,
)
from outrider.models.linear import Linear, reference_linear
from outrider.native import library, set_threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels on this machine")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAN = float("nan")


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(got: Tensor, wanted: Tensor, *, ulps: float = 2.0) -> None:
    """Equal within a few roundings of the tensor's own type, relative to the largest value of the row."""
    step = torch.finfo(got.dtype).eps * (8 if got.dtype == torch.float32 else 1)
    scale = wanted.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    assert got.dtype == wanted.dtype
    assert (((got.float() - wanted.float()) / scale).abs() <= ulps * step).all()


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, layers, attention):
        monkeypatch.setattr(module, "kernels_for", lambda tensor: None)


# ---- linear ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 34), (32, 64), (33, 64), (100, 130), (192, 576)])
def test_linear_is_its_reference(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    weight, added = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1) if bias else None
    for rows in (0, 1, 2, 3, 11, 12, 13, 24, 25, 40):
        x = random(rows, inputs, dtype=dtype, seed=rows + 2)
        y, wide = Linear(weight, added)(x), Linear(weight, added)(x, wide=True)
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        assert (y.dtype, wide.dtype) == (dtype, torch.float32)
        if rows:
            assert_near(wide, exact.float(), ulps=16)
            assert_near(y, exact.to(dtype))
            assert_near(y, reference_linear(x, weight, added), ulps=3)


def test_a_linear_row_does_not_see_the_others(dtype: torch.dtype) -> None:
    layer = Linear(random(75, 66, dtype=dtype), random(75, dtype=dtype, seed=1))
    x = random(40, 66, dtype=dtype, seed=2)
    for wide in (False, True):
        alone = torch.cat([layer(x[row : row + 1].clone(), wide=wide) for row in range(40)])
        for rows in range(1, 41):
            assert torch.equal(layer(x[:rows].clone(), wide=wide), alone[:rows])
        first = 40 - 17
        assert torch.equal(layer(x[first:].clone(), wide=wide), alone[first:])


def test_an_infinite_neighbour_stays_by_itself(dtype: torch.dtype) -> None:
    layer, x = Linear(random(33, 64, dtype=dtype)), random(14, 64, dtype=dtype, seed=2)
    clean = layer(x)
    x[5] = NAN
    spoiled = layer(x)
    kept = torch.arange(14) != 5
    assert torch.equal(spoiled[kept], clean[kept])
    assert spoiled[5].isnan().all()


def test_an_odd_number_of_inputs_takes_the_reference(dtype: torch.dtype) -> None:
    weight, x = random(8, 5, dtype=dtype), random(3, 5, dtype=dtype, seed=1)
    assert torch.equal(Linear(weight)(x), reference_linear(x, weight, None))


# ---- norms, activations, rows ----


@pytest.mark.parametrize("width", [16, 48, 64, 576])
def test_rms_norm_is_its_reference(width: int, dtype: torch.dtype) -> None:
    norm = RMSNorm(1 + random(width, dtype=dtype, seed=5, scale=0.2), 1e-5)
    for rows in (0, 1, 4, 5, 33):
        residual, delta = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=1)
        summed = residual + delta
        plain = norm(residual.clone())
        added = residual.clone()
        both = norm(added, delta)
        assert torch.equal(added, summed), "the sum is rounded once, to the model's type"
        if rows:
            assert_near(plain, reference_rms_norm(residual, norm.weight, norm.eps))
            assert_near(both, reference_rms_norm(summed, norm.weight, norm.eps))


def test_a_width_that_is_no_multiple_takes_the_reference(dtype: torch.dtype) -> None:
    norm, x = RMSNorm(random(20, dtype=dtype), 1e-5), random(3, 20, dtype=dtype, seed=1)
    assert torch.equal(norm(x.clone()), reference_rms_norm(x, norm.weight, norm.eps))
    gate_up = random(3, 40, dtype=dtype)
    assert torch.equal(silu_mul(gate_up), reference_silu_mul(gate_up))


GATED = {"silu": (silu_mul, reference_silu_mul), "gelu": (gelu_mul, reference_gelu_mul)}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("width", [16, 96, 1536])
def test_gated_activations_are_their_references(name: str, width: int, dtype: torch.dtype) -> None:
    fast, plain = GATED[name]
    for rows in (1, 2, 7, 40):
        gate_up = random(rows, 2 * width, dtype=dtype, scale=4.0)
        assert_near(fast(gate_up), plain(gate_up))


@pytest.mark.parametrize("name", GATED)
def test_gated_activations_at_their_extremes(name: str, dtype: torch.dtype) -> None:
    fast, plain = GATED[name]
    gates = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20, -20, 88, -88, 100, -100, 1e4, -1e4, 3e38, -3e38, 1, -1])
    gate_up = torch.cat([gates, torch.ones(16)]).to(dtype)[None]
    got, wanted = fast(gate_up), plain(gate_up)
    assert torch.isfinite(got).all()
    assert torch.allclose(got.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps * 8, atol=1e-30)


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: RMSNorm(torch.ones(x.shape[1], dtype=x.dtype), 1e-5)(x.clone()),
    "silu": silu_mul,
    "gelu": gelu_mul,
}


@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_of_the_small_layers_does_not_see_the_others(name: str, dtype: torch.dtype) -> None:
    x = random(40, 96, dtype=dtype, seed=3)
    alone = torch.cat([ROWWISE[name](x[row : row + 1].clone()) for row in range(40)])
    for rows in range(1, 41):
        assert torch.equal(ROWWISE[name](x[:rows].clone()), alone[:rows])


@pytest.mark.parametrize("width", [1, 16, 33])
def test_taking_rows_is_indexing(width: int, dtype: torch.dtype) -> None:
    table = random(50, width, dtype=dtype)
    for count in (0, 1, 31, 32, 33, 200):
        rows = torch.from_numpy(np.random.default_rng(count).integers(50, size=count))
        assert torch.equal(take_rows(table, rows), table[rows])


@pytest.mark.parametrize("width", [1, 16, 33])
def test_putting_rows_is_indexing(width: int, dtype: torch.dtype) -> None:
    for count in (0, 1, 31, 32, 33, 200):
        table, values = random(250, width, dtype=dtype), random(count, width, dtype=dtype, seed=1)
        rows = torch.from_numpy(np.random.default_rng(count).permutation(250)[:count]).int()
        expected = table.clone()
        expected[rows.long()] = values
        row_writer(table)(rows, values)
        assert torch.equal(table, expected)


# ---- rotary embedding, the paged cache and attention ----


@dataclass
class Case:
    """Sequences laid out over shuffled blocks, with caches that are NaN wherever nothing was written."""

    heads: Heads
    dtype: torch.dtype
    lengths: tuple[int, ...]
    block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        counts = [-(-length // self.block_size) for length in self.lengths]
        shuffled = np.random.default_rng(self.seed).permutation(sum(counts) + 3).tolist()
        self.num_slots = (sum(counts) + 3) * self.block_size
        self.blocks = [[shuffled.pop() for _ in range(count)] for count in counts]
        width = (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_dim
        self.qkv = [random(n, width, dtype=self.dtype, seed=self.seed + i) for i, n in enumerate(self.lengths)]

    def new_cache(self, fill: float = NAN) -> LayerCache:
        cache = LayerCache(self.num_slots, self.heads.num_kv_heads, self.heads.head_dim, self.qkv[0])
        cache.keys.fill_(fill)
        cache.values.fill_(fill)
        return cache

    def batch(self, spans: list[tuple[int, int]]) -> Batch:
        """Rows [first, first + count) of each sequence."""
        ids = np.zeros(sum(count for _, count in spans), dtype=np.int64)
        return Batch.pack(ids, spans, self.blocks, np.zeros(0, dtype=np.int64), self.block_size, torch.device("cpu"))

    def run(self, cache: LayerCache, spans: list[tuple[int, int]], window: int | None = None) -> list[Tensor]:
        """Store those rows and attend with them; results by sequence."""
        batch = self.batch(spans)
        rows = torch.cat([part[first : first + count] for part, (first, count) in zip(self.qkv, spans, strict=True)])
        qkv = rows.clone()
        rope_store(qkv, batch, self.heads, cache)
        out = attend(qkv, batch, batch.starts(window), self.heads, cache)
        return list(out.split([count for _, count in spans]))


def make_heads(num_heads: int, num_kv_heads: int, head_dim: int, norms: bool = False) -> Heads:
    cosine, sine = rope_tables(head_dim, 256, 10000.0, None)
    weights = [1 + random(head_dim, dtype=torch.float32, seed=i, scale=0.1) if norms else None for i in range(2)]
    return Heads(num_heads, num_kv_heads, head_dim, cosine, sine, head_dim**-0.5, weights[0], weights[1])


SHAPES = [(1, 1, 32), (2, 1, 32), (3, 1, 64), (9, 3, 64), (4, 4, 32), (8, 2, 128), (5, 1, 96), (7, 1, 32), (4, 1, 256)]
SHAPES += [(4, 1, 512)]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_attention_is_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, norms: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = make_heads(num_heads, num_kv_heads, head_dim, norms)
    assert fits_kernels(heads)
    case = Case(heads, dtype, (1, 15, 16, 17, 50), block_size=32 if head_dim == 64 else 16)
    spans = [(0, length) for length in case.lengths]
    for window in (None, 1, 5, 16, 33):
        fast_cache = case.new_cache()
        fast = case.run(fast_cache, spans, window)
        with monkeypatch.context() as patch:
            without_kernels(patch)
            slow_cache = case.new_cache()
            slow = case.run(slow_cache, spans, window)
        for got, wanted in zip(fast, slow, strict=True):
            assert_near(got, wanted, ulps=4)
        assert_near(fast_cache.values.nan_to_num().flatten(1), slow_cache.values.nan_to_num().flatten(1))
        slots = torch.arange(case.num_slots)
        keys = [cache.gather(slots)[0] for cache in (fast_cache, slow_cache)]
        assert torch.equal(keys[0].isnan(), keys[1].isnan()), "the same slots were written"
        assert_near(keys[0].nan_to_num().flatten(1), keys[1].nan_to_num().flatten(1), ulps=4)


def dense_attention(case: Case, sequence: int, window: int | None) -> Tensor:
    """Straight from the definition, in float64, without a cache: the reference's reference."""
    heads, qkv = case.heads, case.qkv[sequence].double()
    length, groups = len(qkv), heads.num_heads // heads.num_kv_heads
    query, key, value = qkv.view(length, -1, heads.head_dim).split(
        [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1
    )
    cosine, sine = heads.cosine[:length, None].double(), heads.sine[:length, None].double()

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    query, key = rotate(query), rotate(key).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhe,khe->hqk", query, key) * heads.scale
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = (distance < 0) | (distance >= (window or length))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khe->qhe", weights, value.repeat_interleave(groups, dim=1)).flatten(1)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
@pytest.mark.parametrize("kernels", [True, False])
def test_attention_is_the_definition(kernels: bool, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        without_kernels(monkeypatch)
    case = Case(make_heads(6, 2, 32), torch.float32, (3, 70))
    results = case.run(case.new_cache(), [(0, 3), (0, 70)], window)
    for sequence, got in enumerate(results):
        assert_near(got, dense_attention(case, sequence, window).float(), ulps=8)


@pytest.mark.parametrize("window", [None, 9])
def test_how_a_text_is_cut_changes_no_bit(window: int | None, dtype: torch.dtype) -> None:
    """One pass, token by token, and chunks of every size, beside other sequences or not."""
    case = Case(make_heads(9, 3, 64), dtype, (40, 21))
    whole = case.run(case.new_cache(), [(0, 40), (0, 21)], window)
    for size in range(1, 41):
        cache, parts = case.new_cache(), []
        for first in range(0, 40, size):
            parts.append(case.run(cache, [(first, min(size, 40 - first)), (0, 0)], window)[0])
        assert torch.equal(torch.cat(parts), whole[0]), f"chunks of {size}"


def test_rows_after_the_end_are_overwritten_not_read(dtype: torch.dtype) -> None:
    """A rejected draft's keys and values are NaN here: the rows that come next do not see them."""
    case = Case(make_heads(2, 1, 32), dtype, (30,))
    whole = case.run(case.new_cache(), [(0, 30)])[0]
    cache = case.new_cache()
    first = case.run(cache, [(0, 13)])[0]
    good = case.qkv[0].clone()
    case.qkv[0][13:20] = NAN
    case.run(cache, [(13, 7)])
    case.qkv[0] = good
    rest = case.run(cache, [(13, 17)])[0]
    assert torch.equal(torch.cat([first, rest]), whole)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kernels", [True, False])
def test_what_lies_in_other_slots_changes_nothing(
    kernels: bool, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        without_kernels(monkeypatch)
    case = Case(make_heads(3, 1, 64), dtype, (1, 18, 35))
    spans = [(0, 1), (0, 18), (0, 35)]
    results = [case.run(case.new_cache(fill), spans, window) for fill in (0.0, NAN, 3e38)]
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.isfinite(part).all() for part in results[1])


def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    case = Case(make_heads(9, 3, 64), dtype, (33, 50))
    layer, x = Linear(random(300, 576, dtype=dtype)), random(29, 576, dtype=dtype, seed=1)
    outcomes = []
    try:
        for threads in (1, 2, 3):
            set_threads(threads)
            outcomes.append(
                torch.cat([*case.run(case.new_cache(), [(0, 33), (0, 50)]), layer(x)[:, :1].repeat(1, 576)])
            )
    finally:
        set_threads(torch.get_num_threads())
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_heads_that_kernels_cannot_take_run_all_the_same(dtype: torch.dtype) -> None:
    """A head of 16 is too short for the kernels: the reference takes over without being asked."""
    heads = make_heads(2, 1, 16)
    assert not fits_kernels(heads)
    case = Case(heads, torch.float32, (20,))
    assert_near(case.run(case.new_cache(), [(0, 20)])[0], dense_attention(case, 0, None).float(), ulps=8)


def test_gathering_gives_back_what_was_scattered(dtype: torch.dtype) -> None:
    cache = LayerCache(4 * GROUP, 2, 32, torch.zeros(0, dtype=dtype))
    keys, values = random(9, 2, 32, dtype=dtype), random(9, 2, 32, dtype=dtype, seed=1)
    slots = torch.tensor([0, 15, 16, 63, 40, 41, 7, 33, 2])
    cache.scatter(slots, keys, values)
    got = cache.gather(slots)
    assert torch.equal(got[0], keys)
    assert torch.equal(got[1], values)
    assert cache.num_bytes == 2 * 4 * GROUP * 2 * 32 * keys.element_size()
