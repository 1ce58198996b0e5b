"""Call sites: following only the modules of wanted operations reports what following all modules does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from amct.pytorch.call_sites import CallSite, OperationWatch
from amct.pytorch.layer_hooks import run_in_context


class Block(nn.Module):
    """Adds before and after calling its children, some of which belong to others."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))
        self.act = act
        self.many = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x: Tensor, helper: nn.Module | None = None) -> Tensor:
        y = functional.relu(x + 1) + self.inner(x)
        for each in self.many:
            y = y + each(y)
        y = self.act(y) if helper is None else helper(self.act(y))
        return functional.softplus(y)


class Net(nn.Module):
    """Two blocks that share an activation; the second one calls a module that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
        act = nn.GELU()
        self.blocks = nn.ModuleList([Block(act), Block(act)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x), self.helper)
        return self.blocks[0](x) * 2


Seen = dict[CallSite, Tensor]


def watched(model: nn.Module, x: Tensor, *arguments: object) -> tuple[OperationWatch, Seen]:
    seen: Seen = {}
    watch = OperationWatch(model, seen.__setitem__, *arguments)
    undo = run_in_context(model, lambda _: watch.forward(), is_own=True)
    model(x)
    undo()
    watch.detach()
    return watch, seen


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(
    "paths", [{"blocks.0"}, {"blocks.1"}, {"blocks.0", "blocks.1"}, {"", "blocks.1"}, {"helper.1"}]
)
def test_few_modules_are_followed_and_the_same_is_seen(net, paths):
    x = torch.randn(2, 3)
    everything, all_seen = watched(net, x, None)
    wanted = frozenset((site.path, site.operation) for site in all_seen if site.path in paths)
    callees = {name for path in paths for name in everything.callees(path)}
    expected = {site: value for site, value in all_seen.items() if (site.path, site.operation) in wanted}
    _, seen = watched(net, x, wanted, callees)
    assert seen.keys() == expected.keys()
    assert {site.path for site in seen} == paths
    assert all(torch.equal(value, expected[site]) for site, value in seen.items())


@pytest.mark.parametrize("wanted", [None, frozenset({("", 0), ("blocks.0", 0)})])
def test_what_hooks_of_the_whole_model_compute_does_not_move_its_operations(net, wanted):
    x = torch.randn(2, 3)
    _, plain = watched(net, x, wanted)
    net.register_forward_pre_hook(lambda _, args: ((args[0] + 1) - 1,))
    net.register_forward_hook(lambda _, args, output: output * args[0].sum())
    _, hooked = watched(net, x, wanted)
    assert hooked.keys() == plain.keys()
    assert all(torch.allclose(value, plain[site], atol=1e-5) for site, value in hooked.items())


def test_modules_that_do_not_matter_have_no_hooks(net):
    watch = OperationWatch(net, lambda *_: None, frozenset({("blocks.0", 0)}))
    hooked = {name for name, module in net.named_modules() if module._forward_pre_hooks or module._forward_hooks}
    watch.detach()
    assert hooked == {"blocks.0", "blocks.0.inner", "blocks.0.act", "blocks.0.many", "blocks.0.many.0"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_no_mode_is_left_on_after_an_error(net, error):
    def fail(*_: object) -> None:
        raise error

    watch = OperationWatch(net, lambda *_: None, frozenset({("blocks.0", 0)}))
    net.blocks[0].act.register_forward_hook(fail)
    with pytest.raises(error), watch.forward():
        net(torch.zeros(1, 3))
    assert _get_current_function_mode_stack() == []


def test_a_module_called_by_itself_is_not_watched(net):
    seen: Seen = {}
    OperationWatch(net, seen.__setitem__, frozenset({("blocks.0", 0)}))
    net.blocks[0](torch.zeros(1, 3))
    assert seen == {}
