"""What AMCT's functions of retraining and pruning do first: start the log and check the types of their arguments."""

from __future__ import annotations

from torch import nn

from amct import log
from amct.arguments import FILE, check_types

_TYPES: dict[str, tuple[type, ...]] = {
    "model": (nn.Module,),
    "config_file": FILE,
    "config_defination": FILE,
    "record_file": FILE,
    "pth_file": FILE,
    "save_path": FILE,
    "state_dict_name": (str, type(None)),
}
"""An argument of one name has the same types in every function."""


def start_function(function: str, **arguments: object) -> None:
    """Start the log and check the arguments of a function.

    Raises:
        ArgumentTypeError: An argument has the wrong type; the message names the function.
    """
    log.start("amct_pytorch")
    check_types(function, {name: (value, _TYPES[name]) for name, value in arguments.items()})
