"""DMQ: observe the inputs of the layers to balance, and compute their factors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.calibration import ALONE, BalanceSession
from amct.pipeline.passes import BALANCE
from amct.pipeline.weights import balance_factors
from amct.pytorch.capture.operators import MARK
from amct.pytorch.folding import fuse
from amct.pytorch.functional.layers import layer_module
from amct.pytorch.layer_weights import weight_parts
from amct.pytorch.watch.layer_hooks import given_input, run_in_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.pipeline.passes import Passes
    from amct.pytorch.capture.trace import Traced


def balancing_model(
    traced: Traced,
    plan: Plan,
    on_factors: Callable[[Mapping[str, Tensor]], None],
    *,
    ranks: Ranks = ALONE,
    batch_num: int | None = None,
) -> tuple[nn.Module, BalanceSession]:
    """A folded copy whose balanced layers a session observes; ``on_factors`` gets the factors after each forward.

    They are computed from the largest activation of each channel over all forwards. Of several processes that calibrate
    together each gets the factors once, after its share of ``batch_num`` batches or at the end of the session.
    """
    model = fuse(traced, do_fusion=plan.do_fusion, skip=plan.skip_fusion_layers).model
    plans = {layer.name: layer for layer in plan.balanced}
    order = [name for name in traced.layers if name in plans]
    parts = {name: weight_parts(layer_module(model, name))[0] for name in order}

    def update(maxima: Mapping[str, Tensor]) -> None:
        found = [name for name in order if name in maxima]
        on_factors({name: balance_factors(plans[name], parts[name], maxima[name]) for name in found})

    session = BalanceSession(order, update, ranks=ranks, batch_num=batch_num)
    for name in order:
        module = layer_module(model, name)
        setattr(module, MARK, True)
        module.register_forward_pre_hook(_observing(session, name, parts[name].kind.channel_axis), with_kwargs=True)
    run_in_context(model, lambda _: session.batch())
    return model, session


def _observing(session: BalanceSession, name: str, axis: int) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = given_input(args, kwargs)
        if x is not None:
            session.observe(name, x, axis)

    return hook


def balance_of(traced: Traced, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Compute the factors of all layers that the plan balances; without such layers nothing is run.

    Of several processes each runs its share of the batches, and all get the same factors.
    """
    found: dict[str, Tensor] = {}
    if plan.balanced:
        model, session = balancing_model(traced, plan, found.update, ranks=ranks)
        for args, kwargs in data.observed(BALANCE, session):
            model(*args, **kwargs)
        session.finish()
    return found
