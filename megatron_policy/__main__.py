"""`python -m megatron_policy`: the command line, where its script is not on the path."""

from megatron_policy.cli import app

if __name__ == "__main__":
    app(prog_name="python -m megatron_policy")
