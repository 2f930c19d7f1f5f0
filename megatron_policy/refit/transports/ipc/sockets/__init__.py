"""Sockets between a trainer and an engine on one machine, on ZeroMQ. Read `link.py` first."""

from megatron_policy.extras import require

require("zmq")
