"""SmolVLM: as Idefics3. Videos are pictures, one for each frame."""

from __future__ import annotations

from .idefics3 import NAMES as NAMES
from .idefics3 import take_shell as take_shell
