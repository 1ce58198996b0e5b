"""The user's model, which is never changed: what is refused, copies, copies with plain weights, tensors as arrays."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Collection
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from amct.errors import ModelError
from amct.pytorch.call_sites import FunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

_COMPILED = "_orig_mod"  # torch.compile's attribute for the model; importing its class is slow


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile; any other model itself."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(original := getattr(model, _COMPILED, None), torch.nn.Module):
            model = original
        else:
            return model


def copy_model(model: nn.Module, *, share_tensors: bool = False, without: Iterable[Tensor] = ()) -> nn.Module:
    """A copy in eval mode. With ``share_tensors`` it shares parameters and buffers with the model: read-only.

    Args:
        model: The model.
        share_tensors: Whether nothing is copied but the modules.
        without: Weights that the caller will replace: the copy shares them until then, because they may be large.

    Raises:
        ModelError: some attribute of the model cannot be copied; the message names it.
    """
    shared = {tensor.data_ptr() for tensor in without} - {0}
    memo = {id(tensor): _copied(tensor, share_tensors or (_address(tensor) in shared)) for tensor in _tensors(model)}
    memo.update({id(each): type(each)() for each in empty_attributes(model)})
    with FunctionMode(_copy_features):
        try:
            duplicate: nn.Module = copy.deepcopy(model, memo)
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be copied{_culprit(model)}: {error}. Compression works on a copy so "
                "that your model stays as it is: keep such objects out of the model, or give their class a __deepcopy__"
            ) from error
    for module in duplicate.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.update({key: _rebound(hook, memo) for key, hook in hooks.items() if isinstance(hook, FunctionType)})
        if isinstance(original := getattr(module, _COMPILED, None), torch.nn.Module):
            module.forward = functools.partial(_called, original)  # nothing is compiled for a few batches
    return duplicate.eval()


def copy_in_its_mode(model: nn.Module) -> nn.Module:
    """A copy whose modules are each in the mode (train or eval) of the original."""
    duplicate = copy_model(model)
    for original, copied in zip(model.modules(), duplicate.modules(), strict=True):
        copied.training = original.training
    return duplicate


def _copy_features(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  any result
    """Let features that a hook kept on the model (results with a gradient) be copied: by their values."""
    if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
        return args[0].detach().clone()
    return func(*args, **kwargs)


def _rebound(hook: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A hook made for the copy: it refers to the copies of what it referred to in the model (``self``, a dict)."""
    cells = [(cell, memo.get(id(cell.cell_contents), cell.cell_contents)) for cell in hook.__closure__ or ()]
    if all(copied is cell.cell_contents for cell, copied in cells):
        return hook
    closure = tuple(CellType(copied) for _, copied in cells)
    rebound = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, closure)
    rebound.__kwdefaults__ = hook.__kwdefaults__
    return rebound


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the user's forward
    """Call a module, by whatever torch.export puts in the place of ``Module.__call__`` meanwhile."""
    return module(*args, **kwargs)


_OWN_ATTRIBUTES = frozenset(name for name, value in vars(torch.nn.Module()).items() if isinstance(value, Collection))


def empty_attributes(model: nn.Module) -> Iterator[Any]:
    """The collections that torch gives every module and that are empty in most; copying them one by one is slow."""
    for module in model.modules():
        yield from (value for name, value in vars(module).items() if is_empty_attribute(name, value))


def is_empty_attribute(name: str, value: object) -> bool:
    """Whether this is an empty collection of hooks, buffers or children that every module has."""
    return name in _OWN_ATTRIBUTES and type(value) in (dict, OrderedDict, set) and not value


def own_parameters(duplicate: nn.Module, model: nn.Module) -> None:
    """Copy the parameters that a copy still shares with its model, such as a weight that another module uses too."""
    theirs = {id(parameter) for parameter in model.parameters()}
    copies: dict[int, torch.nn.Parameter] = {}
    for module in duplicate.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in theirs:
                if id(parameter) not in copies:
                    values = parameter.detach().clone()
                    copies[id(parameter)] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = copies[id(parameter)]


def _address(tensor: Tensor) -> int:
    """The place of a tensor's values; 0 if it has none, as on the meta device."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return 0


def _copied(tensor: Tensor, share: bool) -> Tensor:
    if share:
        return tensor
    duplicate = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(duplicate, requires_grad=tensor.requires_grad)
    return duplicate.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor held by a module, including plain attributes (old-style weight_norm)."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
                yield value


def _culprit(model: nn.Module) -> str:
    """`` (attribute "lock" of module "head")`` for the first attribute that cannot be copied."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, {id(tensor): tensor for tensor in _tensors(model)})
            except Exception:  # noqa: BLE001  same code, asked piece by piece
                return f' (attribute "{attribute}" of module "{name}")' if name else f' (attribute "{attribute}")'
    return ""


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor as an array; a CPU tensor shares its memory."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:  # not a NumPy type
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


# -- models that are refused -------------------------------------------------------------------------------------------


AMCT_OPERATORS = frozenset(
    {
        "AscendDeQuant",
        "AscendQuant",
        "Conv2dQAT",
        "ConvTranspose1dQAT",
        "DMQBalancer",
        "GRUQAT",
        "HFMG",
        "IFMR",
        "LSTMQAT",
        "LinearQAT",
        "MarkedQuantizableModule",
        "OFMRQuant",
        "QuantIdentity",
        "RNNRetrainQuant",
        "Recorder",
        "RetrainQuant",
        "SelectiveMaskGen",
    }
)
"""Class names of AMCT's own operators."""

MARK = "amct_operator"
"""A module or class with this attribute set to True must not be compressed again."""


def is_operator(module: nn.Module) -> bool:
    """Whether a compression step inserted the module into the model."""
    return type(module).__name__ in AMCT_OPERATORS or getattr(module, MARK, False) is True


def refuse_operators(model: nn.Module) -> None:
    """Reject a compiled model and a model that is already compressed.

    Raises:
        ModelError: It is a ScriptModule, or it contains compression operators; the message lists them with their types.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a ScriptModule (torch.jit.script or torch.jit.trace), whose layers cannot be changed; "
            "give the nn.Module that it was made from"
        )
    found = {name: type(module).__name__ for name, module in model.named_modules() if is_operator(module)}
    if found:
        listed = ", ".join(f'"{name}" ({kind})' for name, kind in found.items())
        raise ModelError(
            f"the model already contains {len(found)} AMCT operators: {listed}. Start from the original float model"
        )


# -- weights that torch computes ---------------------------------------------------------------------------------------


_HOOKS: tuple[type, ...] = (WeightNorm, SpectralNorm, prune.BasePruningMethod)
"""Older forms of parametrizations: forward pre-hooks that set the weight before each call."""
_HOOK_TENSORS = ("_g", "_v", "_u", "_orig", "_mask")
"""Endings of the tensors from which they compute it."""


def is_parametrized(model: nn.Module) -> bool:
    """Whether torch computes some weight of the model in each forward."""
    return any(parametrize.is_parametrized(module) or _hooks(module) for module in model.modules())


def with_plain_weights(model: nn.Module) -> nn.Module:
    """The model itself, or a copy in eval mode without parametrizations that computes the same.

    The copy shares its other tensors with the model.

    Raises:
        ModelError: the model cannot be copied.
    """
    if not is_parametrized(model):
        return model
    duplicate = copy_model(model, share_tensors=True)
    with torch.no_grad():
        for module in duplicate.modules():
            _remove_parametrizations(module)
            _remove_hooks(module)
    return duplicate


def _remove_parametrizations(module: nn.Module) -> None:
    if not parametrize.is_parametrized(module):
        return
    # torch's remove_parametrizations would also change the user's model: the copy has the same generated class
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    values = {name: getattr(module, name).detach().clone() for name in parametrizations}
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in values.items():
        is_parameter = next(parametrizations[name].parameters(recurse=False), None) is not None
        if is_parameter:
            setattr(module, name, nn.Parameter(value))
        else:
            module.register_buffer(name, value)


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in _hooks(module).items():
        name = getattr(hook, "_tensor_name", None) or getattr(hook, "name")  # noqa: B009  the first of pruning masks
        hook(module, ())  # sets the weight
        value = getattr(module, name).detach().clone()
        del module._forward_pre_hooks[key]
        vars(module).pop(name, None)
        for suffix in _HOOK_TENSORS:
            module._parameters.pop(name + suffix, None)
            module._buffers.pop(name + suffix, None)
        setattr(module, name, nn.Parameter(value))


def _hooks(module: nn.Module) -> dict[int, Callable[..., object]]:
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _HOOKS)}
