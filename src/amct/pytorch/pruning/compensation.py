"""Lets the layers behind a removed channel make up for it: their weights are fitted to the channels that are left.

On data, each removed channel r of a layer's input is approximated by the kept ones, x_r ≈ Σ_k A[r, k] · x_k, with the
coefficients of least squares. Then w_k + Σ_r w_r · A[r, k] in place of w_k gives nearly the same output. A shift of the
mean remains, which the refreshed batch norm behind the layer removes, or its bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from amct.numerics.pruning import Reader, elimination_order, with_ridge
from amct.pytorch.pruning.cutting import removed_positions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.pytorch.pruning.channels import ChannelMap
    from amct.pytorch.pruning.measuring import InputMoments
    from amct.pytorch.pruning.selection import Cell
    from amct.record import PruneRecord


def compensate(model: nn.Module, chains: Sequence[PruneRecord], moments: Mapping[str, InputMoments]) -> None:
    """Change the weights of the layers that read removed channels, in place, before these are cut.

    Args:
        model: The whole model.
        chains: The channels that will be removed.
        moments: What was measured of the inputs of layers; others are left as they are.
    """
    removed: dict[str, set[int]] = {}
    for chain in chains:
        for node in chain.consumers:
            if node.name in moments:
                removed.setdefault(node.name, set()).update(removed_positions(node))
    with torch.no_grad():
        for name, gone in removed.items():
            if gone:
                _fit(model.get_submodule(name), sorted(gone), moments[name])


def _fit(module: nn.Module, removed: Sequence[int], moments: InputMoments) -> None:
    mean, covariance = moments.mean(), moments.covariance()
    gone = torch.tensor(removed, device=mean.device)
    mask = torch.ones(len(mean), dtype=torch.bool, device=mean.device)
    mask[gone] = False
    left = mask.nonzero().flatten()
    coefficients = torch.linalg.solve(with_ridge(covariance[left][:, left]), covariance[left][:, gone]).T
    weight = module.weight
    assert isinstance(weight, Tensor)
    own = weight.to(torch.float64)
    weight[:, left] = (own[:, left] + torch.einsum("or...,rl->ol...", own[:, gone], coefficients)).to(weight.dtype)
    if isinstance(module.bias, Tensor):
        # At the borders of a padded picture the shift does not reach all taps; there the bias is off by a little.
        shift = mean[gone] - coefficients @ mean[left]
        offset = torch.einsum("or...,r->o...", own[:, gone], shift)
        module.bias.add_(offset.reshape(len(own), -1).sum(dim=1).to(module.bias.dtype))


def ranked_by_data(
    cells: Sequence[Cell], channel_map: ChannelMap, moments: Mapping[str, InputMoments]
) -> tuple[Cell, ...]:
    """The cells with their sets in the order in which the layers that read them lose least.

    A cell that no measured layer reads keeps the order of its filters' norms.
    """
    roots = {
        layer.name: channel_map.sets.roots(layer.inputs)
        for layer in channel_map.layers
        if layer.inputs is not None and layer.name in moments
    }
    found = []
    for cell in cells:
        readers = [
            _reader(channel_map.modules[name], moments[name], places)
            for name, inputs in roots.items()
            if (places := _places(cell, inputs)) is not None
        ]
        if readers:
            order, growth = elimination_order(readers)
            cell = replace(cell, roots=tuple(cell.roots[number] for number in order), losses=tuple(growth))
        found.append(cell)
    return tuple(found)


def _places(cell: Cell, inputs: np.ndarray) -> list[int] | None:
    """Where a layer reads each set of a cell; None if it does not, or reads some set several times."""
    where = {int(root): place for place, root in enumerate(inputs.tolist())}
    counts = np.isin(inputs, np.array(cell.roots)).sum()
    if counts != len(cell.roots) or any(root not in where for root in cell.roots):
        return None
    return [where[root] for root in cell.roots]


def _reader(module: nn.Module, moments: InputMoments, places: Sequence[int]) -> Reader:
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows = weight.detach().to(torch.float64).movedim(1, -1).flatten(0, -2)
    return Reader(covariance=moments.covariance(), products=rows.T @ rows, places=torch.tensor(places))
