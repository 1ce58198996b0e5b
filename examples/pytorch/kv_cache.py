"""An 8-bit key/value cache: a decoder reads digits row by row: ``python examples/pytorch/kv_cache.py``."""

from __future__ import annotations

import torch
from shared import OUTPUT, accuracy, digits, train
from torch import Tensor, nn
from torch.nn import functional

import amct_pytorch as amct
from amct.record import read_record

CONFIG = "batch_num: 8 kv_cache_quant_config { quant_layers: 'key' quant_layers: 'value' }"  # 8 rows are 8 forwards


class Decoder(nn.Module):
    """Attention over the rows seen so far; their keys and values are in a cache, here with ``factors`` of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.out = nn.Linear(8 + 8, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 64)
        self.factors = {}

    def forward(self, row: Tensor, position: int, cache: dict[str, list[Tensor]]) -> Tensor:
        """One step: the scores after one more row."""
        place = functional.one_hot(torch.full((len(row),), position), 8)
        x = functional.gelu(self.embed(torch.cat([row, place], 1)))
        for name, tensor in (("key", self.key(x)), ("value", self.value(x))):
            cache.setdefault(name, []).append(self.stored(name, tensor))
        keys, values = torch.stack(cache["key"], 1), torch.stack(cache["value"], 1)
        weights = torch.softmax((keys * self.query(x)[:, None]).sum(2) / 8, 1)
        return self.out(functional.gelu(x + (weights[..., None] * values).sum(1)))

    def stored(self, name: str, x: Tensor) -> Tensor:
        """What the cache gives back: the tensor itself or, with factors, its 8-bit integers times their scale."""
        if name not in self.factors:
            return x
        scale, offset = torch.tensor(self.factors[name].scale), torch.tensor(self.factors[name].offset)
        return ((x / scale).round() + offset).clamp(-128, 127).sub(offset) * scale

    def read(self, images: Tensor) -> Tensor:
        """The decoding loop: 8 steps with one cache."""
        cache: dict[str, list[Tensor]] = {}
        return [self(images[:, 0, 2 * row, ::2], row, cache) for row in range(8)][-1]


if __name__ == "__main__":
    torch.manual_seed(0)
    model, record = Decoder(), OUTPUT / "kv_cache_record.txt"
    train(model, model.read, epochs=20)
    print(f"float cache          {accuracy(model.read):6.2f} %")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "kv_cache.cfg").write_text(CONFIG)
    amct.create_quant_cali_config(OUTPUT / "kv_cache.json", model, config_defination=OUTPUT / "kv_cache.cfg")
    calibrating = amct.create_quant_cali_model(OUTPUT / "kv_cache.json", record, model)
    calibrating.read(torch.from_numpy(digits().images[:64]))
    model.factors = read_record(record).kv_cache
    print(f"8-bit cache          {accuracy(model.read):6.2f} %")
