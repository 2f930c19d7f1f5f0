"""Sets up a worker's logging, which NeMo RL does not do in its workers."""

from __future__ import annotations

import logging
import os


def make_audible() -> None:
    """On rank 0, send this package's log from level INFO up to the worker's output: keys without
    effect, what a start from a checkpoint has restored. An existing level or handlers are kept;
    other ranks would log the same.
    """
    log = logging.getLogger("megatron_policy")
    if os.environ.get("RANK", "0") != "0":
        return
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
