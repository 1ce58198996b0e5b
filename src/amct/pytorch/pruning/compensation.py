"""Pruning with data: it is measured, the layers behind removed channels make up for them, batch norms are refreshed.

On data, each removed channel r of a layer's input is approximated by the kept ones, x_r ≈ Σ_k A[r, k] · x_k, with the
coefficients of least squares. Then w_k + Σ_r w_r · A[r, k] in place of w_k gives nearly the same output. A shift of the
mean remains, which the refreshed batch norm behind the layer removes, or its bias.

Processes of ``torch.distributed`` that prune together measure each on its own data, and all use the mean. Nobody waits
forever: a process that fails, or does not prune at all, is named in the error of the others.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from amct.calibration.ranks import Activity, Meeting, all_ranks, fingerprint
from amct.errors import ModelArgumentError
from amct.numerics.pruning import Reader, elimination_order, with_ridge
from amct.pytorch.call_sites import has_own_forward, observe_operation
from amct.pytorch.pruning.cutting import removed_positions
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.pruning.channels import ChannelMap
    from amct.pytorch.pruning.selection import ChannelCell
    from amct.record import PruneRecord


_PRUNING = Activity(
    noun="pruning",
    verb="prune",
    mismatch="prunes another model",
    requirement="With torch.distributed every process must call prune, each with batches of its own",
)


class Agreement:
    """One measurement that all processes make."""

    def __init__(self, meeting: Meeting | None) -> None:
        """Create it; without a meeting this process is alone."""
        self._meeting = meeting

    def each(self, batches: Iterable[Arguments]) -> Iterator[Arguments]:
        """The batches; the other processes hear how far this one is."""
        for number, batch in enumerate(batches, 1):
            yield batch
            if self._meeting is not None:
                self._meeting.beat(f"measured batch {number}")

    def means(self, values: Iterable[Tensor]) -> list[Tensor]:
        """The mean over all processes of each tensor; to be called once.

        Raises:
            CalibrationError: Another process failed or does not come.
        """
        found = list(values)
        if self._meeting is None:
            return found
        self._meeting.enter()
        for number, value in enumerate(found):
            total = value.clone()
            distributed.all_reduce(total)
            found[number] = total / distributed.get_world_size()
        return found


@contextmanager
def agreement(what: Iterable[str]) -> Iterator[Agreement]:
    """The context of one measurement, with a name of what is measured; if it fails here, it fails in all processes."""
    ranks = all_ranks()
    if ranks.is_alone:
        yield Agreement(None)
        return
    meeting = Meeting(ranks, fingerprint(["prune", *what]), _PRUNING)
    with meeting.together():
        yield Agreement(meeting)


LARGEST_INPUTS = 4096
"""Layers with more input channels are not measured: the covariance grows with their square."""
NOISE = 1e-12
"""What of a variance can be rounding, as a share of the mean square."""
MIXING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose outputs read all inputs, if they have one group; their weights have the inputs on axis 1."""


class InputMoments:
    """Sums over all positions of the inputs of a layer: their number, sum and products."""

    def __init__(self) -> None:
        self.sums = [torch.zeros((), dtype=torch.float64), torch.zeros(()), torch.zeros(())]

    def hook(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the input of one call, as a forward pre-hook."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        axis = -1 if isinstance(module, nn.Linear) else 1 - weight.ndim  # with a batch or without one
        rows = inputs[0].detach().movedim(axis, -1).flatten(0, -2).to(torch.float64)
        count, total, products = self.sums
        self.sums = [count.to(rows.device) + len(rows), total + rows.sum(dim=0), products + rows.T @ rows]

    def mean(self) -> Tensor:
        """The mean of each channel."""
        return self.sums[1] / self.sums[0]

    def covariance(self) -> Tensor:
        """The covariance of the channels; 0 if they vary by no more than the sums are rounded."""
        mean, squares = self.mean(), self.sums[2] / self.sums[0]
        covariance = squares - torch.outer(mean, mean)
        varies = covariance.diagonal().max() > NOISE * squares.diagonal().max()
        return covariance if varies else torch.zeros_like(covariance)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        model(*args, **kwargs)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelArgumentError(
            f"batches: {type(model).__name__} fails on one of them: {error}. Give inputs such as the example"
        ) from error


def _is_measured(module: nn.Module | None) -> bool:
    """Whether each output of a layer reads all inputs, and these are not too many."""
    return isinstance(module, MIXING) and getattr(module, "groups", 1) == 1 and module.weight.shape[1] <= LARGEST_INPUTS


def measure_inputs(model: nn.Module, names: Collection[str], batches: Iterable[Arguments]) -> dict[str, InputMoments]:
    """Run a model in eval mode on data and measure the inputs of some layers, of those whose outputs read all inputs.

    Layers without input are left out. Processes of distributed training use the mean of what all have measured, so that
    they choose the same channels.
    """
    modules = dict(model.named_modules())
    moments = {name: InputMoments() for name in sorted(names) if _is_measured(modules.get(name))}  # in every process
    watched = copy_model(model, share_tensors=True)
    for name, moment in moments.items():
        module = watched.get_submodule(name)
        if has_own_forward(module):
            observe_operation(module, lambda x, _, add=moment.hook, module=module: add(module, (x,)))  # type: ignore[misc]
        else:
            module.register_forward_pre_hook(moment.hook)
    with torch.no_grad(), agreement(["inputs", *moments]) as agreed:
        for args, kwargs in agreed.each(batches):
            _run(watched, args, kwargs)
        found = {name: moment for name, moment in moments.items() if moment.sums[0] > 0}
        means = iter(agreed.means([each for moment in found.values() for each in moment.sums]))
        for moment in found.values():
            moment.sums = [next(means), next(means), next(means)]
    for name, moment in found.items():
        if not torch.isfinite(moment.sums[2]).all():
            raise ModelArgumentError(
                f'batches: the input of layer "{name}" holds NaN or infinite values; look for broken data or a layer '
                "that computes them"
            )
    return found


def refresh_batch_norms(model: nn.Module, batches: Iterable[Arguments]) -> None:
    """Measure the mean and variance of every batch norm anew, as the average over all batches, in place."""
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        with torch.no_grad(), agreement(["batch norms", str(len(norms))]) as agreed:
            for args, kwargs in agreed.each(batches):
                _run(model, args, kwargs)
            measured = [each for norm in norms for each in (norm.running_mean, norm.running_var) if each is not None]
            for statistic, mean in zip(measured, agreed.means(measured), strict=True):
                statistic.copy_(mean)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training


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
    cells: Sequence[ChannelCell], channel_map: ChannelMap, moments: Mapping[str, InputMoments]
) -> tuple[ChannelCell, ...]:
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


def _places(cell: ChannelCell, inputs: np.ndarray) -> list[int] | None:
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
