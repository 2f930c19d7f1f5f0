"""Worker processes, whatever they run: their resources, environment, calls and failures, and how
stopped ones are detected. Read `group.py` first, then `virtual_cluster.py` and `watch.py`.
"""

from megatron_policy.extras import require

require("ray")
