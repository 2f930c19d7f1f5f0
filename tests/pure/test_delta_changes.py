"""What a rank finds of its own shares, as it is cast and cut, makes an engine's weights its own;
and a copy that memory has damaged is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_policy.converters.rows.regions import Region
from megatron_policy.refit.deltas import changes
from megatron_policy.refit.deltas.changes import OwnShare, SentCopy
from megatron_policy.refit.deltas.message import decode_message, encode_message
from megatron_policy.refit.deltas.patching import OtherWeightsError, Patches
from megatron_policy.refit.plan import RefitTensor

ROWS, COLUMNS = 37, 26
LEFT, RIGHT = (Region((ROWS, COLUMNS // 2), (COLUMNS, 1), at) for at in (0, COLUMNS // 2))
WHOLE = Region((ROWS, COLUMNS), (COLUMNS, 1), 0)


class Trainer:
    """A rank with a parameter whose halves it sends in the other order, and one that is cast."""

    def __init__(self) -> None:
        self.held = {"halves": torch.randn(ROWS, COLUMNS), "cast": torch.randn(ROWS, COLUMNS)}
        dtypes = {"halves": torch.float32, "cast": torch.bfloat16}
        pieces = {"halves": ((LEFT, RIGHT), (RIGHT, LEFT)), "cast": ((WHOLE, WHOLE),)}
        names: list[Any] = [*self.held]
        self.copy = SentCopy(
            [
                OwnShare(RefitTensor(name, (ROWS, COLUMNS), dtypes[name]), name, pieces[name])
                for name in names
            ],
            self._view,
        )

    def _view(self, name: Any, region: Region) -> Tensor:
        return self.held[name].as_strided(*region)

    def weights(self) -> dict[str, Tensor]:
        """All weights as an engine has them."""
        return {
            "halves": self.held["halves"].roll(COLUMNS // 2, 1).contiguous(),
            "cast": self.held["cast"].bfloat16(),
        }

    def train(self, share: float = 0.1) -> None:
        """Change some elements."""
        for held in self.held.values():
            held += torch.randn(ROWS, COLUMNS) * (torch.rand(ROWS, COLUMNS) < share)

    def send(self, engine: dict[str, Tensor]) -> None:
        """Make the engine's weights those of now; OtherWeightsError if it refuses."""
        patches = Patches(engine)
        patches.apply(decode_message(encode_message(self.copy.advance())))
        patches.check()


@pytest.mark.parametrize("bytes_at_a_time", [16, 1 << 20])
def test_an_engine_follows_shares_that_are_cut_and_cast(bytes_at_a_time: int, monkeypatch) -> None:
    monkeypatch.setattr(changes, "_STEP", bytes_at_a_time)
    torch.manual_seed(0)
    trainer = Trainer()
    engine = trainer.weights()
    for share in (0.1, 0, 1, 0.001, 0.3):
        trainer.train(share)
        trainer.send(engine)
        assert all(torch.equal(engine[name], now) for name, now in trainer.weights().items())


def test_a_flipped_bit_of_an_engine_or_the_copy_is_refused_until_sums_are_forgotten() -> None:
    torch.manual_seed(0)
    trainer = Trainer()
    engine = trainer.weights()
    trainer.train()
    trainer.send(engine)
    engine["cast"].view(torch.int16)[3, 4] ^= 1 << 7
    trainer.train()
    with pytest.raises(OtherWeightsError, match="cast"):
        trainer.send(engine)

    engine = trainer.weights()
    trainer.copy._shares[0].bits[5] ^= 1 << 20
    trainer.train()
    with pytest.raises(OtherWeightsError, match="halves"):
        trainer.send(engine)

    engine = trainer.weights()
    trainer.copy.forget_sums()
    trainer.train()
    trainer.send(engine)
