"""The trainable model is a plain module: modes, states, copies, other torch features, and what peers' users miss."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from qat_helpers import Flow, Net, evaluate, images, labels, net, train
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amct.pytorch as amct
from amct.errors import ExportError, ModelError
from amct.pytorch.qat.layers import quantized_layers

LEARNED = "retrain_weight_quant_config { ulq_retrain { dst_type: INT8 } }"


@pytest.fixture(scope="module")
def prepared():
    """A model prepared on a batch; each test copies it."""
    return amct.prepare_qat(net(), images())


@pytest.fixture
def model(prepared):
    return copy.deepcopy(prepared)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The model of AMCT's function, after one step."""
    flow = Flow(tmp_path_factory.mktemp("qat"), LEARNED)
    created = flow.create()
    train(created, [0])
    return created


def same_state(first, second):
    one, other = first.state_dict(), second.state_dict()
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_the_users_model_is_not_changed_and_the_result_is_of_its_class():
    original = net().train()
    before = copy.deepcopy(original.state_dict())
    model = amct.prepare_qat(original, images())
    train(model, range(2))
    assert all(torch.equal(before[key], value) for key, value in original.state_dict().items())
    assert type(original) is Net
    assert isinstance(model, Net)
    assert original.training


def test_names_of_parameters_stay_and_quantizers_are_added(model):
    names = set(model.state_dict())
    assert set(net().state_dict()) <= names
    added = names - set(net().state_dict())
    assert added
    assert all(".input_quantizer." in name or ".weight_quantizer." in name for name in added)


def test_modules_keep_their_modes():
    original = net()
    original.b1.eval()
    model = amct.prepare_qat(original, images())
    assert model.training
    assert not model.b1.training
    assert model.b3.training


def test_switching_modes_resets_nothing(model):
    train(model, range(2))
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model.eval()
        model.train()
    assert (model.b1.eps, model.b1.momentum, model.drop.p) == (1e-3, 0.2, 0.3)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.drop.training
    assert not model.eval().drop.training


def test_nothing_is_observed_in_eval_mode(model):
    train(model, [0])
    before = copy.deepcopy(model.state_dict())
    first = evaluate(model, images(1))
    evaluate(model, 100 * images(2))
    assert torch.equal(evaluate(model, images(1)), first)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_outputs_without_gradients_need_none(model):
    assert not evaluate(model, images()).requires_grad


def test_every_parameter_gets_a_gradient(model):
    functional.cross_entropy(model.train()(images()), labels()).backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


def test_training_is_deterministic_with_a_seed(prepared):
    found = []
    for _ in range(2):
        model = copy.deepcopy(prepared)
        torch.manual_seed(1)
        train(model, range(3))
        found.append(model)
    assert same_state(*found)


def test_training_lowers_the_loss(model):
    model.drop.p = 0.0
    losses = train(model, [0] * 12)
    assert losses[-1] < 0.9 * losses[0]


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_is_independent_and_follows_its_own_batch_norm(model):
    duplicate = copy.deepcopy(model)
    x = images(1)
    before = evaluate(model, x)
    train(duplicate, range(2))
    assert torch.equal(evaluate(model, x), before)
    with torch.no_grad():
        duplicate.b1.weight.neg_()
    assert torch.equal(duplicate.c1.weight_quantizer.lowest() == -127, duplicate.b1.weight < 0)
    assert torch.equal(model.c1.weight_quantizer.lowest() == -127, model.b1.weight < 0)
    assert duplicate.c3.activation is duplicate.c2.activation


def test_pickled_and_saved_whole_it_is_the_same(model):
    train(model, [0])
    for duplicate in (pickle.loads(pickle.dumps(model)), torch.load(_saved(model), weights_only=False)):
        assert same_state(model, duplicate)
        assert torch.equal(evaluate(duplicate, images(1)), evaluate(model, images(1)))
        assert type(duplicate) is type(model)
        train(duplicate, [1])


def _saved(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return stream


# -- states ------------------------------------------------------------------------------------------------------------


def test_the_state_of_the_float_model_loads(model):
    other = net(seed=5)
    clips = model.c1.input_quantizer.clips
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.c1.weight, other.c1.weight)
    assert model.c1.input_quantizer.clips == clips
    # learned scales begin anew from the loaded weights
    largest = other.c1.weight.detach().abs().amax(dim=(1, 2, 3))
    assert ((model.c1.weight_quantizer.scale * 128 - largest).abs() <= 0.01 * largest).all()


def test_the_state_of_a_trained_model_loads_strictly(started):
    other = copy.deepcopy(started)
    train(other, [1])
    assert not same_state(started, other)
    other.load_state_dict(started.state_dict())
    assert same_state(started, other)
    missing = "c1.input_quantizer.clip_max"
    broken = {key: value for key, value in started.state_dict().items() if key != missing}
    with pytest.raises(RuntimeError, match=missing.replace(".", r"\.")):
        other.load_state_dict(broken)


# -- quantizers --------------------------------------------------------------------------------------------------------


def test_layers_of_the_same_tensor_share_one_quantizer(model):
    assert model.c3.activation is model.c2.input_quantizer
    assert not any(name.startswith("c3.input_quantizer") for name in model.state_dict())
    assert len(list(model.parameters())) == len({id(parameter) for parameter in model.parameters()})


def test_layers_with_other_settings_have_their_own(tmp_path):
    override = (
        'override_layer_configs { layer_name: "c3" retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }'
    )
    created = Flow(tmp_path, override).create()
    assert created.c3.activation is not created.c2.activation
    assert (created.c3.activation.bits, created.c2.activation.bits) == (16, 8)


def test_clips_never_come_from_the_example_input(tmp_path):
    created = Flow(tmp_path, example=1000 * images()).create()
    assert not created.c1.input_quantizer.has_clips()
    train(created, [0])
    assert created.c1.input_quantizer.clips[1] < 10


def test_the_precision_mode_rounds_the_scale_in_training_too(tmp_path):
    created = Flow(tmp_path, "fakequant_precision_mode: FORCE_FP16_QUANT").create()
    train(created, [0])
    scale = created.c1.input_quantizer.qparams().step
    assert scale == torch.tensor(scale).half().float().item()
    used = created.c1.input_quantizer.eval()(images()).unique().diff().min().item()
    assert used == pytest.approx(scale, rel=1e-3)


def test_a_model_in_training_is_not_prepared_twice(model):
    with pytest.raises(ModelError, match="already contains"):
        amct.prepare_qat(model, images())


def saved_bytes(model):
    """The memory of all tensors that a forward keeps for its gradient."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = functional.cross_entropy(model.train()(images(count=64)), labels(count=64))
    del loss
    return sum(kept.values())


def test_a_step_keeps_little_more_than_a_float_step():
    """Per layer the input as it was and on its grid, nothing else of its size."""
    original = net()
    assert saved_bytes(amct.prepare_qat(original, images())) <= 1.6 * saved_bytes(original)


# -- other features of torch -------------------------------------------------------------------------------------------


def test_bfloat16_autocast_trains(model):
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(images()), labels())
    loss.backward()
    assert model.c1.input_quantizer.clip_max.grad.dtype is torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = evaluate(model, images())
    assert (half.float() - evaluate(model, images())).abs().max() < 0.1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, while compiling
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # likewise
def test_a_compiled_model_trains_the_same(tmp_path):
    plain = Flow(tmp_path, LEARNED).create()
    plain.drop.p = 0.0
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="aot_eager")
    first, second = train(plain, range(3)), train(compiled, range(3))
    assert first == pytest.approx(second, abs=1e-4)
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("batch_num", [1, 2])
def test_gradient_checkpointing_observes_every_batch_once(tmp_path, batch_num):
    states = []
    for number, kind in enumerate((Net, Checkpointed)):
        original = kind()
        original.load_state_dict(net().state_dict())
        original.drop.p = 0.0
        (tmp_path / str(number)).mkdir()
        created = Flow(tmp_path / str(number), f"batch_num: {batch_num}", original).create()
        train(created, range(4))
        assert created.c1.input_quantizer.batches == batch_num
        states.append(created)
    for name in ("clip_min", "clip_max"):
        one, two = (getattr(model.c1.input_quantizer, name) for model in states)
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_synchronized_batch_norm_keeps_the_signs_it_is_asked_for(model):
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(converted.b1, nn.SyncBatchNorm)
    with torch.no_grad():
        converted.b1.weight.neg_()
    assert torch.equal(converted.c1.weight_quantizer.lowest() == -127, converted.b1.weight < 0)


def test_channels_last_gives_the_same(model):
    expected = evaluate(model, images())
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    found = evaluate(other, images().to(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    train(other, [0])


def test_a_model_moves_to_another_type_of_memory_and_back(model):
    expected = evaluate(model, images())
    assert torch.equal(evaluate(model.double().float(), images()), expected)


# -- kinds of layers ---------------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv1d(3, 4, 3, padding=1)
        self.b1 = nn.BatchNorm1d(4)
        self.t1 = nn.ConvTranspose1d(4, 4, 2, stride=2, groups=2)
        self.c2 = nn.Conv2d(4, 4, 3, padding=1)
        self.t2 = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.bt = nn.BatchNorm2d(4)
        self.c3 = nn.Conv3d(4, 2, (1, 3, 3), padding=(0, 1, 1))
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.gru = nn.GRU(6, 5)
        self.fc = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.t1(torch.relu(self.b1(self.c1(x))))
        x = torch.relu(self.c2(x.unsqueeze(2)))
        x = torch.relu(self.bt(self.t2(x)))
        x = self.c3(x.unsqueeze(2))
        x, _ = self.lstm(x.flatten(1)[:, :32].reshape(x.shape[0], 4, 8))
        x, _ = self.gru(x)
        return self.fc(x[:, -1])


@pytest.mark.parametrize("algorithm", ["arq_retrain", "ulq_retrain"])
def test_every_kind_of_layer_trains(tmp_path, algorithm):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8)
    flow = Flow(tmp_path, f"retrain_weight_quant_config {{ {algorithm} {{ }} }}", Kinds(), x)
    created = flow.create().train()
    assert set(quantized_layers(created)) == {"c1", "t1", "c2", "t2", "c3", "lstm", "gru", "fc"}
    optimizer = torch.optim.SGD(created.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (created(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert created.lstm.state_quantizer.has_clips()
    assert (evaluate(created, x) - evaluate(created, x)).abs().max() == 0
    duplicate = pickle.loads(pickle.dumps(created))
    assert torch.equal(evaluate(duplicate, x), evaluate(created, x))


class PaddedConv(nn.Conv2d):
    """Pads by itself and calls the function with its weight, as some libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(functional.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride)


class WithOwnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = PaddedConv(3, 4, 3)
        self.fc = nn.Linear(4, 2)
        self.held = [self.own]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.held[0](x)).mean((2, 3)))


def test_a_layer_of_the_users_own_class_keeps_its_forward():
    torch.manual_seed(0)
    original = WithOwnLayer().eval()
    model = amct.prepare_qat(original, images())
    assert isinstance(model.own, PaddedConv)
    assert model.held[0] is model.own
    difference = (evaluate(model, images()) - evaluate(original, images())).abs().max()
    assert 0 < difference < 0.01
    functional.cross_entropy(model.train()(images()), labels() % 2).backward()
    assert model.own.weight.grad is not None
    assert model.own.weight_quantizer.scale.grad is not None
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(evaluate(duplicate, images()), evaluate(model, images()))
        assert isinstance(duplicate.own.weight, nn.Parameter)


class Linked(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.register_buffer("links", torch.eye(2).to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.links @ self.body(x))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch says that they may change
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["sparse_coo", "sparse_csr"])
def test_a_model_with_a_sparse_buffer_trains_and_names_it_where_it_cannot_be_saved(layout, tmp_path):
    x = torch.randn(2, 6)
    model = amct.prepare_qat(Linked(layout), x)
    model.train()(x).sum().backward()
    with pytest.raises(ExportError, match=rf'"links" is sparse \({str(layout)[6:]}\)'):
        model.save(tmp_path / "net")
