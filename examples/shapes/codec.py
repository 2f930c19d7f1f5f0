"""Converts between pictures with words and the policy's tensors."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from megatron_policy import BatchedDataDict
from quickstart.codec import Codec

from .task import Problem


class PictureCodec(Codec):
    """The quickstart's codec, whose rows carry the pictures of their problems too."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, processor: Qwen2VLImageProcessorPil
    ) -> None:
        super().__init__(tokenizer)
        self._processor = processor

    def prompts(self, problems: Sequence[Problem]) -> BatchedDataDict:
        return self._add_pictures(super().prompts(problems), problems)

    def demonstrations(
        self, problems: Sequence[Problem], answers: Sequence[str]
    ) -> BatchedDataDict:
        return self._add_pictures(super().demonstrations(problems, answers), problems)

    def _add_pictures(self, batch: BatchedDataDict, problems: Sequence[Problem]) -> BatchedDataDict:
        """`batch` with `pixel_values` and `image_grid_thw` of each row. Rows with one picture share
        its tensors, which travel to a worker once, and which the tower then reads once.
        """
        different = list({problem.shapes: problem for problem in problems}.values())
        seen = self._processor([each.draw() for each in different], return_tensors="pt")
        grids = seen["image_grid_thw"].split(1)
        pixels = seen["pixel_values"].split([int(grid.prod()) for grid in grids])
        number = {problem.shapes: place for place, problem in enumerate(different)}
        rows = [number[problem.shapes] for problem in problems]
        batch["pixel_values"] = [pixels[row] for row in rows]
        batch["image_grid_thw"] = [grids[row] for row in rows]
        return batch
