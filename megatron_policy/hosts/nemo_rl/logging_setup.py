"""Makes a worker's log heard: NeMo RL sets up none in its workers. Says nothing itself."""

from __future__ import annotations

import logging
import os


def make_audible() -> None:
    """On rank 0 let what this package logs from level INFO on reach the worker's output: keys
    without effect, what a start from a checkpoint has restored. A level or handlers that are set
    stay; other ranks would say the same.
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
