"""What a policy offers; the older contract has the driver group tensors for a refit."""

import os


class ColocatablePolicyInterface:
    """The methods that tell the contracts apart."""

    if os.environ.get("STANDIN_CONTRACT") == "older":

        def prepare_weights_for_ipc(self) -> list[list[str]]:
            raise NotImplementedError
