"""The policy and what its engines agree on."""
