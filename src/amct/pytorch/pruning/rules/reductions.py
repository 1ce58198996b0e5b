"""Rules of operations over positions of a picture or over whole axes: pooling, resizing, means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.pytorch.pruning.rules.registry import Flow, argument, positive, rule

if TYPE_CHECKING:
    from amct.pytorch.capture.program_reader import Operation
    from amct.pytorch.pruning.channel_sets import Axes

_SPATIAL = {
    name: rank
    for rank in (1, 2, 3)
    for name in (
        f"max_pool{rank}d", f"avg_pool{rank}d", f"adaptive_avg_pool{rank}d", f"adaptive_max_pool{rank}d",
        f"lp_pool{rank}d", f"max_pool{rank}d_with_indices", f"upsample_nearest{rank}d",
        f"upsample_nearest_exact{rank}d", f"_upsample_nearest_exact{rank}d", f"reflection_pad{rank}d",
        f"replication_pad{rank}d", f"fractional_max_pool{rank}d",
    )
} | {
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
}  # fmt: skip


@rule(*_SPATIAL)
def over_positions(flow: Flow, operation: Operation) -> Axes | list[Axes]:
    """Every channel by itself, over the last axes."""
    rank = _SPATIAL[operation.kind]
    axes = flow.of(operation.operands[0])
    flow.keep(axes[-rank:], operation, "mixes the positions of this axis")
    found = (*axes[:-rank], *(None,) * rank)
    return [found, found] if operation.items else found


@rule(
    "mean", "amax", "amin", "sum", "var", "std", "prod", "logsumexp", "norm", "linalg_vector_norm", "argmax", "argmin",
    "any", "all",
)  # fmt: skip
def reduction(flow: Flow, operation: Operation) -> Axes:
    """One value for whole axes. Only a sum stays right when channels are removed."""
    axes = list(flow.of(operation.operands[0]))
    place = 2 if operation.kind in ("norm", "linalg_vector_norm") else 1
    given = argument(operation, place)
    chosen = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    chosen = range(len(axes)) if not isinstance(chosen, (list, tuple)) or not chosen else chosen
    gone = {positive(axis, len(axes)) for axis in chosen}
    if operation.kind != "sum":
        flow.keep([axes[axis] for axis in gone], operation, "reduces over all channels")
    result = operation.results[0].shape or ()
    if len(result) == len(axes):
        return tuple(None if axis in gone else labels for axis, labels in enumerate(axes))
    return tuple(labels for axis, labels in enumerate(axes) if axis not in gone)
