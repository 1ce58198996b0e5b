"""Layers with 2:4 masks: gradients, when masks are chosen, plain state, exports."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amct.pytorch
from amct.numerics.pruning import two_of_four_mask
from amct.pytorch.pruning.saving import plain_copy
from amct.pytorch.pruning.sparse import make_sparse, sparse_layers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.up(torch.relu(self.conv(x)))).mean((2, 3)))


@pytest.fixture
def sparse():
    torch.manual_seed(0)
    return amct.pytorch.sparsify(Net(), torch.randn(2, 8, 4, 4))


def test_convolutions_transposed_convolutions_and_linear_layers_are_sparse(sparse):
    layers = sparse_layers(sparse.model)
    assert list(layers) == ["conv", "up", "fc"]
    plain = plain_copy(sparse.model)
    for name, axis in (("conv", 1), ("up", 0), ("fc", 1)):
        weight = plain.get_submodule(name).weight
        assert torch.equal(weight * two_of_four_mask(weight, axis), weight)
        assert (weight == 0).float().mean() >= 0.3
        expected = layers[name].weight * two_of_four_mask(layers[name].weight, axis)
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    assert {type(module) for module in plain.modules()} == {Net, nn.Conv2d, nn.ConvTranspose2d, nn.Linear}


def test_the_plain_copy_computes_the_same(sparse):
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(plain_copy(sparse.model)(x), sparse.model.eval()(x), rtol=0, atol=0)


def test_removed_weights_have_no_gradient(sparse):
    sparse.model.train()
    sparse.model(torch.randn(2, 8, 4, 4)).sum().backward()
    for layer in sparse_layers(sparse.model).values():
        assert layer.weight.grad is not None
        assert (layer.weight.grad[layer.weight_mask == 0] == 0).all()


@pytest.mark.parametrize(("frequency", "chosen"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2])])
def test_when_masks_are_chosen(frequency, chosen):
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    make_sparse(model, {"0": frequency})
    layer = model[0].train()
    found = []
    for step in range(4):
        with torch.no_grad():
            layer.weight.copy_(torch.randn(4, 8))
        layer(torch.randn(1, 8))
        if torch.equal(layer.weight_mask, two_of_four_mask(layer.weight, 1).to(torch.uint8)):
            found.append(step)
    assert found == chosen


def test_eval_chooses_no_mask_and_counts_no_step():
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    make_sparse(model, {"0": 1})
    mask = model[0].weight_mask.clone()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(4, 8))
        model.eval()(torch.randn(1, 8))
    assert torch.equal(model[0].weight_mask, mask)
    assert int(model[0].mask_steps) == 0


def test_state_copies_and_pickles_as_any_other(sparse):
    x = torch.randn(2, 8, 4, 4)
    expected = sparse.model.eval()(x)
    assert set(sparse.model.state_dict()) - set(Net().state_dict()) == {
        f"{name}.{key}" for name in ("conv", "up", "fc") for key in ("weight_mask", "mask_steps")
    }
    fresh = amct.pytorch.sparsify(Net(), x).model.eval()
    fresh.load_state_dict(sparse.model.state_dict())
    for duplicate in (fresh, copy.deepcopy(sparse.model), pickle.loads(pickle.dumps(sparse.model))):
        torch.testing.assert_close(duplicate(x), expected, rtol=0, atol=0)


def test_under_distributed_data_parallel(sparse, tmp_path):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(sparse.model.train())
        model(torch.randn(2, 8, 4, 4)).sum().backward()
        assert model.module.conv.weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


def test_a_layer_with_a_forward_of_its_own_is_reported():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    result = amct.pytorch.sparsify(nn.Sequential(nn.Linear(8, 8), Own(8, 4)), torch.randn(1, 8))
    assert list(sparse_layers(result.model)) == ["0"]
    assert [(skip.layer, skip.reason) for skip in result.skipped] == [("1", "Own has a forward of its own")]


def test_sparse_and_quantized(sparse):
    batches = [torch.randn(4, 8, 4, 4) for _ in range(2)]
    trainable = amct.pytorch.prepare_qat(sparse.model, batches)
    trainable.train()
    optimizer = torch.optim.SGD(trainable.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        trainable(batch).square().sum().backward()
        optimizer.step()
    quantized = trainable.eval().quantized(batches)
    for name, axis in (("conv", 1), ("up", 0), ("fc", 1)):
        weight = quantized.prepared.quantized_copy().get_submodule(name).weight
        assert torch.equal(weight * two_of_four_mask(weight, axis), weight)
    torch.testing.assert_close(quantized(batches[0]), trainable(batches[0]), rtol=1e-4, atol=1e-4)
