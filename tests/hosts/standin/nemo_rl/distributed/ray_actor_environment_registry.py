"""Which Python runs which worker; the stand-in's own Megatron workers need what nobody has."""

ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": "uv run mcore",
    "nemo_rl.models.policy.megatron_policy_worker.MegatronPolicyWorker": "uv run mcore",
    "nemo_rl.models.value.workers.megatron_value_worker.MegatronValueWorker": "uv run mcore",
}


def get_actor_python_env(actor_class_fqn: str) -> str:
    """The Python of a worker; ValueError for one that nobody registered."""
    if actor_class_fqn not in ACTOR_ENVIRONMENT_REGISTRY:
        raise ValueError(f"no Python is registered for {actor_class_fqn}")
    return ACTOR_ENVIRONMENT_REGISTRY[actor_class_fqn]
