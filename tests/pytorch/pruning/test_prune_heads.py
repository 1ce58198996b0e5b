"""Attention loses whole heads, in the styles of the vision transformers; groups of channels lose other ones each."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from test_prune_random_nets import zeroed
from torch import nn
from torch.nn import functional

import amct.pytorch
from amct.errors import RecordError
from amct.pytorch.capture.trace import trace
from amct.pytorch.pruning.cutting import NUMBER
from amct.pytorch.pruning.full_reach import Wanted, prune_fully

HALF = Wanted(ratio=lambda _: 0.5, align=lambda _: 1, kept={})


class Attention(nn.Module):
    """One projection to queries, keys and values; heads, their width and their product are attributes."""

    def __init__(self, width=16, heads=4, *, fused=True, head=None, norm=False):
        super().__init__()
        head = head or width // heads
        self.num_heads, self.head_dim, self.attn_dim = heads, head, heads * head
        self.scale, self.fused = head**-0.5, fused
        self.qkv = nn.Linear(width, 3 * heads * head)
        self.q_norm = nn.LayerNorm(head) if norm else nn.Identity()
        self.proj = nn.Linear(heads * head, width)

    def forward(self, x):
        n, length, _ = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = self.q_norm(q)
        if self.fused:
            x = functional.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * self.scale @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(n, length, self.attn_dim))


class Windows(Attention):
    """With a table of biases, and a mask that is repeated for each head or added in a view of windows."""

    def __init__(self, width=16, heads=4, *, fused=True):
        super().__init__(width, heads, fused=fused)
        self.table = nn.Parameter(torch.randn(9, heads))
        self.register_buffer("places", torch.randint(0, 9, (5, 5)))
        self.register_buffer("mask", torch.randn(2, 5, 5))

    def bias(self):
        return self.table[self.places.view(-1)].view(5, 5, -1).permute(2, 0, 1).contiguous().unsqueeze(0)

    def forward(self, x):
        n, length, _ = x.shape
        heads = self.num_heads
        qkv = self.qkv(x).reshape(n, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused:
            mask = self.mask.view(1, 2, 1, length, length).expand(n // 2, -1, self.num_heads, -1, -1)
            bias = self.bias() + mask.reshape(-1, self.num_heads, length, length)
            x = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = q * self.scale @ k.transpose(-2, -1) + self.bias()
            scores = scores.view(-1, 2, self.num_heads, length, length) + self.mask.unsqueeze(1).unsqueeze(0)
            x = scores.view(-1, self.num_heads, length, length).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(n, length, -1))


class Separate(nn.Module):
    """Three projections, and heads by einsum; the scale is computed from the width of a head."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = (each(x).view(n, length, self.heads, -1) for each in (self.q, self.k, self.v))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores + torch.einsum("nhqk,nhqk->nhqk", scores, scores)
        return self.proj(
            torch.einsum("nhqk, nkhd -> nqhd", functional.dropout(scores.softmax(-1), 0.1, False), v).flatten(2)
        )


class Transformer(nn.Module):
    """Two blocks on a stream that keeps its width, so that only heads and MLPs are pruned."""

    def __init__(self, *attentions):
        super().__init__()
        self.attentions = nn.ModuleList(attentions)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in attentions)
        self.up = nn.ModuleList(nn.Linear(16, 24) for _ in attentions)
        self.down = nn.ModuleList(nn.Linear(24, 16) for _ in attentions)

    def forward(self, x):
        for attention, norm, up, down in zip(self.attentions, self.norms, self.up, self.down, strict=True):
            x = x + attention(norm(x))
            x = x + down(functional.gelu(up(x)))
        return x


CASES = {
    "fused": lambda: (Attention(), Attention(norm=True)),
    "products": lambda: (Attention(fused=False), Attention(fused=False, norm=True)),
    "as many heads as values in each": lambda: (Attention(heads=4, head=4), Attention(heads=4, head=4, fused=False)),
    "wide heads": lambda: (Attention(heads=3, head=8), Attention(heads=3, head=8)),
    "many heads": lambda: (Attention(heads=8, head=2), Attention(heads=6, head=2)),
    "windows": lambda: (Windows(), Windows(heads=2)),
    "windows of products": lambda: (Windows(fused=False), Windows(heads=2, fused=False)),
    "einsum": lambda: (Separate(), Separate(heads=2)),
}


def whole_heads(model, name):
    """The heads of an attention that are left, and how many values each has."""
    attention = model.attentions[name]
    heads = getattr(attention, "num_heads", None) or attention.heads
    return heads, attention.proj.in_features // heads


@pytest.mark.parametrize("case", CASES)
def test_whole_heads_go(case, tmp_path):
    torch.manual_seed(0)
    model, x = Transformer(*CASES[case]()).double().eval(), torch.randn(4, 5, 16, dtype=torch.float64)
    before = [whole_heads(model, place) for place in (0, 1)]
    pruned = prune_fully(trace(model, x), HALF)
    after = [whole_heads(pruned.model, place) for place in (0, 1)]
    assert [heads for heads, _ in after] == [heads - round(heads / 2) for heads, _ in before]
    assert [width for _, width in after] == [width for _, width in before]
    assert [layer.out_features for layer in pruned.model.up] == [12, 12]
    torch.testing.assert_close(pruned.model(x), zeroed(model, pruned.after)(x), rtol=1e-9, atol=1e-9)

    result = amct.pytorch.prune(model.float(), x.float(), 0.5, align=1)
    result.save(tmp_path / "net")
    again = amct.pytorch.restore_pruned(model, tmp_path / "net_record.txt", tmp_path / "net_state.pth")
    assert [whole_heads(again, place) for place in (0, 1)] == after
    torch.testing.assert_close(again.eval()(x.float()), result.model.eval()(x.float()), rtol=0, atol=0)


def test_macs_of_attention_are_counted():
    """Of 4 heads of width 4 on 5 positions: queries by keys and weights by values."""
    for attention in (Attention(), Attention(fused=False), Separate()):
        found = amct.pytorch.prune(Transformer(attention).eval(), torch.randn(1, 5, 16), 0.5, align=1)
        heads, linear = 2 * 4 * 5 * 5 * 4, 5 * (4 * 16 * 16 + 2 * 16 * 24)
        assert found.before.macs == heads + linear
        assert found.after.macs == found.before.macs / 2


class Literal(Attention):
    """The number of heads is written in its code."""

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, -1))


class OfTheStream(Attention):
    """The width behind the heads is that of the input."""

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width))


class Averaged(Attention):
    """Computes with the number of its heads."""

    def forward(self, x):
        return super().forward(x) / self.num_heads


@pytest.mark.parametrize("kind", [Literal, OfTheStream, Averaged])
def test_heads_that_cannot_go_say_why(kind):
    torch.manual_seed(0)
    model, x = Transformer(kind()).double().eval(), torch.randn(2, 5, 16, dtype=torch.float64)
    pruned = prune_fully(trace(model, x), HALF)
    assert pruned.channels["attentions.0.qkv"] == (48, 48)
    reasons = {skip.layer: skip.reason for skip in pruned.skips}
    assert "test_prune_heads.py:" in reasons["attentions.0.qkv"]
    assert pruned.model.attentions[0].num_heads == 4
    assert pruned.channels["up.0"] == (24, 12)
    torch.testing.assert_close(pruned.model(x), zeroed(model, pruned.after)(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stream_ratio", [0.25, 0.5])
def test_the_stream_stays_where_its_width_is_that_of_the_heads(stream_ratio):
    """The stream and the heads would lose other shares; the MLPs are pruned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), Transformer(OfTheStream(), OfTheStream()), nn.Linear(16, 3)).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    wanted = Wanted(
        ratio=lambda cell: 0.75 if "qkv" in cell.makers[0].name else stream_ratio, align=lambda _: 1, kept={}
    )
    pruned = prune_fully(trace(model.eval(), x), wanted)
    left = round(24 * (1 - stream_ratio))
    assert [pruned.channels[name][1] for name in ("0", "1.attentions.0.qkv", "1.up.0")] == [16, 48, left]
    reasons = {skip.layer: skip.reason for skip in pruned.skips}
    assert "computes with the size of another tensor" in reasons["0"]
    torch.testing.assert_close(pruned.model(x), zeroed(model, pruned.after)(x), rtol=1e-9, atol=1e-9)


def test_a_search_takes_whole_heads():
    torch.manual_seed(0)
    stem, end = nn.Linear(6, 16), nn.Linear(16, 3)
    model = nn.Sequential(stem, Transformer(Attention(), Attention(fused=False)), end).eval()
    with torch.no_grad():
        model[1].attentions[0].proj.weight[:, 4:12] *= 1e-4  # of two heads nothing is left
    result = amct.pytorch.prune_to(model, [torch.randn(16, 5, 6)], flops=0.8, align=1, keep=["0"])
    found = [whole_heads(result.model[1], place) for place in (0, 1)]
    assert [width for _, width in found] == [4, 4]
    assert found[0][0] <= 2


class ByEinsum(nn.Module):
    """An MLP whose weights are parameters of its own."""

    def __init__(self, *, einsum):
        super().__init__()
        self.einsum = einsum
        self.up, self.down = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(16, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        if self.einsum:
            x = torch.einsum("nlc,cf->nlf", x, self.up).relu()
            return self.last(torch.einsum("nlf,fc->nlc", x, self.down))
        return self.last((x @ self.up).relu() @ self.down)


@pytest.mark.parametrize("einsum", [True, False])
def test_widths_of_products_with_parameters(einsum, tmp_path):
    torch.manual_seed(0)
    model, x = ByEinsum(einsum=einsum).eval(), torch.randn(2, 5, 6)
    result = amct.pytorch.prune(model, x, 0.5, align=1)
    assert result.channels == {"up": (16, 8), "down": (8, 4), "last": (3, 3)}
    assert (result.before.macs, result.after.macs) == (2 * 5 * (96 + 128 + 24), 2 * 5 * (48 + 32 + 12))
    result.save(tmp_path / "net")
    again = amct.pytorch.restore_pruned(model, tmp_path / "net_record.txt", tmp_path / "net_state.pth").eval()
    assert [again.up.shape, again.down.shape] == [(6, 8), (8, 4)]
    torch.testing.assert_close(again(x), result.model(x), rtol=0, atol=0)


class Scaled(nn.Module):
    """Divides by the number of its channels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(x / x.shape[-1])


def test_a_number_of_channels_in_arithmetic_keeps_them():
    result = amct.pytorch.prune(Scaled(), torch.randn(2, 6), 0.5, align=1)
    assert result.channels["first"] == (8, 8)
    assert "computes with a number of channels" in result.skipped[0].reason


def test_a_number_in_a_record_must_be_the_one_of_the_model():
    model, x = Transformer(Attention()).eval(), torch.randn(2, 5, 16)
    record = amct.pytorch.prune(model, x, 0.5, align=1).record
    assert any(node.kind == NUMBER for chain in record.prune for node in chain.consumers)
    other = copy.deepcopy(model)
    other.attentions[0].num_heads = 8
    with pytest.raises(RecordError, match="expected an attribute with the value 4, got 8"):
        amct.pytorch.restore_pruned(other, record)


# ------------------------------------------------------------------------------------------------------- groups


def grouped_net(kind):
    torch.manual_seed(0)
    layer = {
        "convolution": nn.Conv2d(8, 8, 3, padding=1, groups=2),
        "transposed": nn.ConvTranspose2d(8, 8, 3, padding=1, groups=2),
        "norm": nn.GroupNorm(2, 8),
    }[kind]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.Tanh(), nn.Conv2d(8, 4, 1)).double().eval()
    weak = [0, 1, 6, 7]  # at other positions of each group
    with torch.no_grad():
        model[0].weight[weak] *= 1e-3
        if kind != "norm":
            axis = 0 if kind == "convolution" else 1
            model[1].weight.movedim(axis, 0)[weak if axis == 0 else [0, 1]] *= 1e-3
    return model, weak


@pytest.mark.parametrize("kind", ["convolution", "transposed", "norm"])
def test_each_group_loses_its_own_weakest_channels(kind):
    model, weak = grouped_net(kind)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pruned = prune_fully(trace(model, x), HALF)
    first = next(chain for chain in pruned.chains if chain.producers[0].name == "0")
    assert sorted(first.producers[0].prune_index) == weak
    assert pruned.model[1].weight.shape[0] == 4
    torch.testing.assert_close(pruned.model(x), zeroed(model, pruned.after)(x), rtol=1e-9, atol=1e-9)


def test_nested_groups_and_groups_across_a_sum_lose_as_many():
    """Finer groups behind coarser ones, and two grouped layers that are added, whose weakest channels differ."""
    torch.manual_seed(0)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, groups=4)
            self.norm, self.last = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.last(self.norm(self.a(x) + self.b(x)))

    model, x = Sum().double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    pruned = prune_fully(trace(model, x), HALF)
    assert {pruned.channels[name] for name in ("stem", "a", "b")} == {(8, 4)}
    torch.testing.assert_close(pruned.model(x), zeroed(model, pruned.after)(x), rtol=1e-9, atol=1e-9)
