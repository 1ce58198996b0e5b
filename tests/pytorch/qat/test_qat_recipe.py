"""What ``QatModel.recipe`` proposes: rates in steps of the grids, a loss without weights to tune, a word on harm."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from qat_helpers import Flow, images, labels, net
from torch import nn
from torch.nn import functional

import amct.pytorch as amct
from amct.errors import ArgumentError, TrainingError
from amct.numerics.training.losses import balanced, class_rows
from amct.pytorch.qat.layers import quantized_layers

FOUR_BITS = amct.QatConfig(weight_bits=4, activation_bits=4)


class Attention(nn.Module):
    """A block of a transformer with a projection of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)
        self.leave = nn.Linear(16, 5)

    def forward(self, x):
        x = self.enter(x)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.outer(functional.gelu(self.inner(self.norm2(x))))
        return self.leave(x.mean(1))


def sequences(seed=0, count=16):
    return torch.randn(count, 7, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made():
    """By kind of net and bits: a model in training with a teacher, its recipe, and its batches."""
    found = {}
    for kind, data in (("cnn", images), ("transformer", sequences)):
        torch.manual_seed(0)
        original = (net() if kind == "cnn" else Attention()).train()
        for seed in range(20):  # batch norms measure this data
            original(data(seed=-seed, count=32))
        original.eval()
        if kind == "cnn":
            original.fc.weight.data *= 30  # scores that differ from picture to picture
        for bits in (4, 8):
            config = FOUR_BITS if bits == 4 else None
            found[kind, bits] = amct.prepare_qat(original, data(count=32), config, teacher=original), data
    return found


def distance(model, data):
    """From the teacher, on data that nothing has seen."""
    x = data(seed=99, count=128)
    with torch.no_grad():
        return model.distillation_loss(x, model.eval()(x)).item()


# -- the proposal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_a_run_as_proposed_brings_the_outputs_nearer_to_the_teachers(made, kind, bits, caplog):
    model, data = made[kind, bits]
    model = copy.deepcopy(model)
    before = distance(model, data)
    recipe = model.recipe(data(count=16), steps_per_epoch=30, epochs=2)
    assert recipe.epoch_ended(before, higher_is_better=False)
    for epoch in range(recipe.epochs):
        model.train()
        for step in range(recipe.steps_per_epoch):
            x = data(seed=1000 * epoch + step + 1, count=16)
            recipe.optimizer.zero_grad()
            recipe.loss(x, model(x)).backward()
            recipe.optimizer.step()
            recipe.schedule.step()
        assert recipe.epoch_ended(distance(model, data), higher_is_better=False)
    assert distance(model, data) < before
    assert "training does harm" not in caplog.text
    assert all(group["lr"] == pytest.approx(0, abs=1e-12) for group in recipe.optimizer.param_groups)


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_every_parameter_is_in_one_group_with_a_positive_rate(made, kind):
    model, data = made[kind, 4]
    groups = model.recipe(data()).optimizer.param_groups
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(each) for each in model.parameters())
    assert all(0 < group["lr"] < 0.1 for group in groups)
    others = {group["name"].removeprefix("other parameters of ") for group in groups if "other" in group["name"]}
    assert others == ({"norm1", "norm2", "attention", "attention.out_proj"} if kind == "transformer" else set())


def rates(model, **options):
    """Those of a recipe before its rates were halved."""
    recipe = model.recipe(images(), **options)
    halved = recipe.pace / options.get("pace", 1.0)
    return {group["name"]: group["lr"] / halved for group in recipe.optimizer.param_groups}


def test_rates_are_shares_of_the_steps_of_the_grids(made):
    model, _ = made["cnn", 8]
    found = rates(model)
    for name, layer in quantized_layers(model).items():
        step = layer.weight_quantizer.scale.mean().item()
        assert found[f"weights of {name}"] == pytest.approx(step / 64)
        assert found[f"weight scales of {name}"] == pytest.approx(step / 64 / 128)
    low, high = model.c2.activation.clips
    assert found["clips of c2"] == pytest.approx((high - low) / 255 / 64)
    assert found["biases of c2"] == pytest.approx(model.c2.weight_quantizer.scale.mean().item() * high / 64)
    assert rates(model, pace=0.5)["weights of c1"] == pytest.approx(found["weights of c1"] / 2)


def test_a_layer_in_other_units_gets_other_rates():
    """Weights a thousand times as large behind which a norm divides: the same function, its rates in its own units."""
    plain, large = net(), net()
    with torch.no_grad():
        large.c1.weight *= 1024
        large.b1.running_mean *= 1024
        large.b1.running_var *= 1024**2
    found, other = (rates(amct.prepare_qat(each, images(), teacher=each)) for each in (plain, large))
    assert other["weights of c1"] == pytest.approx(1024 * found["weights of c1"], rel=1e-4)
    assert other["weights of c2"] == pytest.approx(found["weights of c2"], rel=1e-2)


def test_steps_that_are_too_large_are_found_on_the_batch(made):
    model, _ = made["cnn", 8]
    recipe = model.recipe(images(), pace=1e6)
    assert recipe.pace < 1e6
    assert "on half of this batch changed the loss of the other half from" in str(recipe)


class FixedBatch(nn.Module):
    """A forward for four samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 5)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).reshape(4, 512))


@pytest.mark.parametrize(("make", "count"), [(FixedBatch, 4), (net, 1)])
def test_a_batch_that_cannot_be_halved_is_tried_whole(make, count):
    original = make()
    model = amct.prepare_qat(original, images(count=count), teacher=original)
    assert "changed the loss of the other half" in str(model.recipe(images(count=count)))


def test_epochs_follow_the_length_of_the_data(made):
    loader = [(images(seed), labels(seed)) for seed in range(50)]
    four, eight = made["cnn", 4][0], made["cnn", 8][0]
    assert (four.recipe(loader).epochs, four.recipe(loader).steps_per_epoch) == (6, 50)
    assert eight.recipe(loader).epochs == 2
    assert four.recipe(loader, epochs=1).schedule.T_max == 50
    assert four.recipe((images(), labels())).steps_per_epoch == 300
    assert eight.recipe(iter(loader), steps_per_epoch=1000).epochs == 1


def test_a_proposal_changes_neither_weights_nor_random_numbers(made):
    model = copy.deepcopy(made["cnn", 4][0]).train()
    before, torch_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.recipe((images(), labels()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_norms_keep_their_statistics_and_dropout_is_off_unless_the_user_says():
    original = net()
    model = amct.prepare_qat(original, images()).train()
    assert model.b1.training
    text = str(model.recipe((images(), labels())))
    assert "batch norms keep their statistics" in text
    assert "dropout is off (p = 0 in 1 module)" in text
    assert not model.b1.training
    assert not model.eval().train().b1.training
    assert (model.drop.p, original.drop.p) == (0, 0.3)
    other = amct.prepare_qat(original, images(), freeze_norms=False).train()
    assert "go on measuring" in str(other.recipe((images(), labels())))
    assert other.b1.training


def test_it_can_be_read(made):
    text = str(made["cnn", 4][0].recipe((images(), labels())))
    assert text.startswith("1 epoch of 300 steps: Adam, CosineAnnealingLR over 300 steps")
    for kind in ("weights", "weight scales", "clips", "biases", "norms"):
        assert f"  {kind}:" in text
    assert "not tried on the batch" in str(amct.prepare_qat(net(), images()).recipe(images()))


@pytest.mark.parametrize("name", ["epochs", "steps_per_epoch", "pace"])
def test_numbers_are_above_zero(made, name):
    with pytest.raises(ArgumentError, match=f"{name}: expected a number above 0, got 0"):
        made["cnn", 8][0].recipe(images(), **{name: 0})


def test_a_model_of_amcts_functions_has_a_recipe_after_its_first_batch(tmp_path):
    model = Flow(tmp_path).create()
    with pytest.raises(TrainingError, match=r"range of its input is not known yet.*first batches in train mode"):
        model.recipe((images(), labels()))
    model.train()(images())
    assert model.recipe((images(), labels())).loss(images(), model(images()), labels()).requires_grad


# -- the loss ----------------------------------------------------------------------------------------------------------


def expected_loss(own, teacher, classes, temperature=4.0):
    """In NumPy and float64, from the formula of the documents."""

    def log_softmax(scores):
        scores = scores - scores.max(1, keepdims=True)
        return scores - np.log(np.exp(scores).sum(1, keepdims=True))

    own, teacher = own.numpy().astype(np.float64), teacher.numpy().astype(np.float64)
    trust = np.exp(log_softmax(teacher))[np.arange(len(own)), classes]
    soft, hard = log_softmax(teacher / temperature), log_softmax(own / temperature)
    divergence = (np.exp(soft) * (soft - hard)).sum(1) * temperature**2
    crossed = -log_softmax(own)[np.arange(len(own)), classes]
    return (trust * divergence + (1 - trust) * crossed).mean()


def test_teacher_and_labels_share_each_sample(made):
    model, _ = made["cnn", 8]
    x, y = images(3), labels(3)
    outputs = model.eval()(x)
    with torch.no_grad():
        wanted = expected_loss(outputs.detach(), model._qat.teacher[0](x), y.numpy())
    assert model.recipe(x).loss(x, outputs, y).item() == pytest.approx(wanted, rel=1e-4)


def test_a_teacher_that_knows_the_label_is_learned_and_one_that_does_not_is_not():
    own, classes = torch.randn(3, 5), torch.tensor([0, 1, 2])
    sure = functional.one_hot(classes, 5) * 100.0
    wrong = functional.one_hot(classes + 1, 5) * 100.0
    crossed = functional.cross_entropy(own, classes)
    assert torch.allclose(balanced(own, wrong, classes, 4.0), crossed)
    assert balanced(sure, sure, classes, 4.0) == 0
    assert torch.allclose(balanced(own, None, classes, 4.0), crossed)
    assert torch.allclose(balanced(own, wrong, functional.one_hot(classes, 5).float(), 4.0), crossed)


@pytest.mark.parametrize(
    ("scores", "classes"), [((4, 5), (4,)), ((4, 5, 3, 2), (4, 3, 2)), ((4, 7, 5), (4, 7)), ((4, 5), (4, 5))]
)
def test_classes_are_found_in_scores_of_any_form(scores, classes):
    given = torch.randn(scores)
    wanted = torch.rand(classes) if classes == scores else torch.randint(0, 5, classes)
    rows, found = class_rows(given, wanted)
    assert rows.shape[1] == 5
    assert len(found) == len(rows)
    first = functional.cross_entropy(rows, found)
    if scores == (4, 7, 5):
        given = given.movedim(2, 1)
    assert torch.allclose(first, functional.cross_entropy(given, wanted))
    if wanted.dtype == torch.int64:
        wanted.view(-1)[0] = -100
        padded = balanced(*class_rows(torch.randn(scores), wanted)[:1], None, class_rows(given, wanted)[1], 4.0)
        assert torch.isfinite(padded)


def test_the_users_own_loss_pulls_no_harder_than_the_teacher(made):
    model, _ = made["cnn", 4]
    x = images(5)
    outputs = model.eval()(x)
    recipe = model.recipe(x)
    distance = model.distillation_loss(x, outputs)
    pull = [torch.autograd.grad(each, outputs, retain_graph=True)[0] for each in (distance, outputs.sum())]
    for factor in (1e-6, 1.0, 1e6):
        own = factor * outputs.sum()
        found = torch.autograd.grad(recipe.loss(x, outputs, own=own), outputs, retain_graph=True)[0] - pull[0]
        wanted = min(pull[0].norm().item(), factor * pull[1].norm().item())
        assert found.norm().item() == pytest.approx(wanted, rel=1e-3)


def test_without_labels_it_is_the_teachers_and_without_a_teacher_the_labels():
    original, x = net(), images()
    taught = amct.prepare_qat(original, x, teacher=original)
    outputs = taught(x)
    assert torch.equal(taught.recipe(x).loss(x, outputs), taught.distillation_loss(x, outputs))
    alone = amct.prepare_qat(original, x)
    recipe, outputs = alone.recipe((x, labels())), alone(x)
    assert torch.allclose(recipe.loss(x, outputs, labels()), functional.cross_entropy(outputs, labels()))
    own = outputs.square().mean()
    assert recipe.loss(x, outputs, own=own) is own
    with pytest.raises(TrainingError, match=r"nothing to learn from.*labels or own.*teacher=float_model"):
        recipe.loss(x, outputs)
    with pytest.raises(ArgumentError, match=r"labels: \[8, 2\] of torch.int64 belong to no output"):
        recipe.loss(x, outputs, labels()[:, None].repeat(1, 2))


# -- a run that gets worse ---------------------------------------------------------------------------------------------


def harm(text):
    return text.count("training does harm")


def test_an_epoch_whose_metric_is_worse_is_said_once(made, caplog):
    recipe = made["cnn", 4][0].recipe(images())
    assert recipe.epoch_ended(0.891)
    assert recipe.epoch_ended(0.890)  # noise
    assert not recipe.epoch_ended(0.729)
    assert "from 0.89 to 0.729 in an epoch, 0.891 at first" in caplog.text
    assert f"pace={recipe.pace / 4:g}" in caplog.text
    assert not recipe.epoch_ended(0.5)
    assert harm(caplog.text) == 1


def test_losing_more_than_half_of_the_gain_is_said_and_small_changes_are_not(made, caplog):
    recipe = made["cnn", 4][0].recipe(images())
    assert all(recipe.epoch_ended(value) for value in (80.0, 84.0, 83.0, 85.0, 85.0))
    assert not recipe.epoch_ended(81.0)
    assert harm(caplog.text) == 1


@pytest.mark.parametrize(("told", "best"), [((70, 80, 75, 60), 1), ((70, 69, 68, 67), 0), ((70, 60, 75, 80), 3)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_model_goes_back_to_its_best_after_the_last_epoch(made, caplog, told, best, sign):
    caplog.set_level("INFO", "amct")
    model, states = copy.deepcopy(made["cnn", 4][0]), []
    recipe = model.recipe(images(), steps_per_epoch=2, epochs=3)
    for number, metric in enumerate(told):
        for seed in range(2 * (number > 0)):
            x = images(seed=10 * number + seed)
            recipe.optimizer.zero_grad()
            recipe.loss(x, model.train()(x)).backward()
            recipe.optimizer.step()
            recipe.schedule.step()
        states.append(copy.deepcopy(model.state_dict()))
        recipe.epoch_ended(sign * metric, higher_is_better=sign > 0)
    differs = [
        any(not torch.equal(value, state[name]) for name, value in model.state_dict().items()) for state in states
    ]
    assert differs == [number != best for number in range(4)]
    assert ("the model goes back to its best, " in caplog.text) == (best < 3)


def test_an_epoch_whose_loss_rises_is_said_without_a_metric(made, caplog):
    model = copy.deepcopy(made["cnn", 4][0]).train()
    recipe = model.recipe(images(), steps_per_epoch=40)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, maximize=True)  # away from the teacher
    x = images()
    for _ in range(80):
        optimizer.zero_grad()
        recipe.loss(x, model(x)).backward()
        optimizer.step()
    assert harm(caplog.text) == 1
    assert "the loss rose from" in caplog.text
