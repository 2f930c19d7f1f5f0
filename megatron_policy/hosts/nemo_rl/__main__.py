"""`python -m megatron_policy.hosts.nemo_rl [-m] PROGRAM [ARGS...]`: like `python [-m] PROGRAM
[ARGS...]`, with this package's worker in NeMo RL.
"""

from __future__ import annotations

import sys

from megatron_policy.errors import ConfigError
from megatron_policy.hosts import launch
from megatron_policy.hosts.nemo_rl import install

USAGE = "usage: python -m megatron_policy.hosts.nemo_rl [-m] PROGRAM [ARGS...]"
FAILED, NOT_UNDERSTOOD = 1, 2


def prepare(words: list[str]) -> launch.Program:
    """The program that `words` name, ready to run; on failure, exit with a message on stderr."""
    if words[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n{__doc__}")
        raise SystemExit(0)
    try:
        program = launch.Program.parse(words)
        launch.find(program)
    except ConfigError as error:
        print(f"{USAGE}\nerror: {error}", file=sys.stderr)
        raise SystemExit(NOT_UNDERSTOOD) from None
    try:
        install()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    return program


if __name__ == "__main__":
    launch.run(prepare(sys.argv[1:]))
