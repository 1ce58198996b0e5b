"""Random networks: the pruned one runs, its output has the same shape, and removing zeroed channels changes nothing."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_nets import RandomNet
from torch import nn

from amct.pytorch.capture.trace import trace
from amct.pytorch.pruning.full_reach import Wanted, prune_fully
from amct.pytorch.pruning.removal import cost_of


def zeroed(model, removal):
    """A copy whose removed channels have zeros in every weight that makes or reads them."""
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        grouped = {layer.weight: layer for layer in removal.channel_map.layers if in_groups(duplicate, layer.name)}
        for name, parameter in duplicate.named_parameters():
            for axis, labels in enumerate(removal.channel_map.parameters.get(name, ())):
                if labels is not None and not (axis == 1 and name in grouped):
                    parameter.index_fill_(axis, torch.from_numpy(removal.removed(labels)), 0.0)
        for name, layer in grouped.items():
            parameter, groups = duplicate.get_parameter(name), duplicate.get_submodule(layer.name).groups
            columns = layer.inputs if layer.axes[0] == 1 else layer.outputs  # each group has its own behind its rows
            for part, own in zip(parameter.chunk(groups), columns.reshape(groups, -1), strict=True):
                part.index_fill_(1, torch.from_numpy(removal.removed(own)), 0.0)
    for name, module in list(duplicate.named_modules()):
        labels = removal.channel_map.parameters.get(f"{name}.weight", (None,))[0]
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) and labels is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(duplicate.get_submodule(parent), leaf, NormOfOthers(module, removal.removed(labels)))
    return duplicate


def in_groups(model, name):
    return getattr(model.get_submodule(name), "groups", 1) > 1 if name in dict(model.named_modules()) else False


class NormOfOthers(nn.Module):
    """A norm over the channels that are not removed: zeros would count in its mean and variance."""

    def __init__(self, norm, removed):
        super().__init__()
        self.norm = norm
        self.kept = [place for place in range(len(norm.weight)) if place not in set(removed.tolist())]

    def forward(self, x):
        found = torch.zeros_like(x)
        if isinstance(self.norm, nn.GroupNorm):
            kept, norm = x[:, self.kept], self.norm
            options = {"weight": norm.weight[self.kept], "bias": norm.bias[self.kept], "eps": norm.eps}
            found[:, self.kept] = nn.functional.group_norm(kept, norm.num_groups, **options)
            return found
        kept, norm = x[..., self.kept], self.norm
        spread = (kept.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        values = (kept - kept.mean(-1, keepdim=True)) / spread
        found[..., self.kept] = values * norm.weight[self.kept] + norm.bias[self.kept]
        return found


@given(st.integers(0, 2**31))
@settings(max_examples=12)
def test_removing_zeroed_channels_changes_nothing(seed):
    model = RandomNet(seed).double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    pruned = prune_fully(trace(model, x), Wanted(ratio=lambda _: 0.5, align=lambda _: 1, kept={}))
    assert pruned.chains, pruned.skips
    assert cost_of(pruned.after).macs < cost_of(pruned.before).macs
    assert sum(p.numel() for p in pruned.model.parameters()) == cost_of(pruned.after).parameters
    assert set(pruned.channels) == {n for n, m in model.named_modules() if makes_channels(m)}
    kept = {name for name, (before, after) in pruned.channels.items() if before == after}
    assert {skip.layer for skip in pruned.skips} == kept
    torch.testing.assert_close(pruned.model(x), zeroed(model, pruned.after)(x), rtol=1e-9, atol=1e-9)


def makes_channels(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        return not (module.groups > 1 and module.groups == module.in_channels)
    return isinstance(module, nn.Linear)
