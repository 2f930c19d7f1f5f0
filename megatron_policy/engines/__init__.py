"""The training engines, which compute a policy. Each implements `interfaces.engine` and is the only
package that imports its third-party library. Read `megatron/assemble.py` first.
"""
