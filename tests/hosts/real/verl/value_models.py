"""verl's own engine asks for an attention of GPUs when it loads a value model. Imported by verl's
processes (`VERL_USE_EXTERNAL_MODULES`), this module gives it one of the CPU.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForTokenClassification

ASKED, GIVEN = "flash_attention_2", "sdpa"
_load = AutoModelForTokenClassification.from_pretrained


def _loaded(*arguments: Any, **keywords: Any) -> Any:
    if keywords.get("attn_implementation") == ASKED:
        keywords["attn_implementation"] = GIVEN
    return _load(*arguments, **keywords)


AutoModelForTokenClassification.from_pretrained = _loaded
