"""vLLM: what its workers load and answer, and what the process that owns an `LLM` calls."""
