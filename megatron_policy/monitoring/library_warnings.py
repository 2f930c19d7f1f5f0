"""Warnings of libraries, collected into one line while a model is imported and built."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_policy.device import is_accelerated

_log = logging.getLogger(__name__)

VARIABLE = "MEGATRON_POLICY_WARNINGS"
"""With the value "all" every warning is shown where and when it is raised."""

LIBRARIES: tuple[str, ...] = ("megatron", "transformer_engine", "apex", "absl", "modelopt")
LIBRARIES += ("torch", "transformers", "triton", "flash_attn")
_SHOWN, _LENGTH = 3, 60
"""Kinds in the line, and characters of each."""

_OF_STEPS = (
    # Steps of Megatron-Core call functions of torch by names that newer releases deprecate.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    # fp32 parameters of its optimizer are views of the model's, whose `grad` it looks at.
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning),
)
_WITHIN = r"(megatron(_policy)?|torch\.distributed)\."
"""Where these are raised; torch's wrappers of collectives stand between the two."""
# Without a GPU this advice about CUDA's queues is for nobody.
_OF_GPUS = (r"(?s).*CUDA_DEVICE_MAX_CONNECTIONS", UserWarning)


@contextmanager
def collect_warnings() -> Iterator[None]:
    """In this context warnings that libraries raise are kept, and logged as one line at its end,
    also after an error: a warning on rank 0, an information elsewhere. Others are shown as ever.

    The caller's filters decide as before: what they turn into errors is raised, and what they
    ignore is not counted. The variable `VARIABLE` switches all of this off.
    """
    if os.environ.get(VARIABLE, "").strip().lower() == "all":
        yield
        return
    kept: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            try:
                yield
            finally:
                kept = list(caught)
    finally:
        folders = (getattr(sys.modules.get(name), "__path__", ()) for name in LIBRARIES)
        roots = tuple(os.path.join(path, "") for paths in folders for path in paths)
        of_libraries = []
        hidden = (*_OF_STEPS, *(() if is_accelerated() else (_OF_GPUS,)))
        for each in kept:
            if each.filename.startswith(roots):
                text = str(each.message)
                if not any(re.match(pattern, text) for pattern, _ in hidden):
                    of_libraries.append(each)
            else:
                warnings.showwarning(
                    each.message, each.category, each.filename, each.lineno, each.file, each.line
                )
        if of_libraries:
            level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.INFO
            _log.log(level, "%s", summarize(of_libraries))
        for message, category in hidden:
            # Last: filters of the caller's own come first.
            warnings.filterwarnings("ignore", message, category, module=_WITHIN, append=True)


def summarize(found: Sequence[warnings.WarningMessage]) -> str:
    """How many warnings there were, and the first of each kind, the most frequent first."""
    kinds: Counter[str] = Counter()
    for each in found:
        text = " ".join(str(each.message).split())
        text = text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."
        kinds[f"{each.category.__name__}: {text}"] += 1
    shown = [kind for kind, _ in kinds.most_common(_SHOWN)]
    more = f"; and others ({len(kinds) - _SHOWN})" if len(kinds) > _SHOWN else ""
    number = f"{len(found)} warning{'s' * (len(found) > 1)} of libraries"
    return f"{number} (set {VARIABLE}=all to see them): {'; '.join(shown)}{more}"
