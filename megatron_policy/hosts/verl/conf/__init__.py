"""Groups of verl's configuration, by `hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]`.

Read `engine/megatron_policy.yaml` first: the others name it.
"""
