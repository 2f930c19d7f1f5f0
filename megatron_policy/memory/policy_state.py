"""What a policy is doing and whether its weights are valid. Each change is a named transition; an
illegal one names the call that makes it legal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.memory.states import TRAIN, Kind, MemoryState, Requirement, check_permits

STEP_OPEN = (
    "a training step is open: call finish_train_step(), or abort_train_step() to drop its "
    "gradients; if it is taken in pieces, step() or zero_gradients()"
)


class PolicyState:
    """The state of one rank's policy; all ranks make the same transitions in the same order."""

    def __init__(self, *, awaits_weights: bool = False) -> None:
        """`awaits_weights` is whether no weights were read: a load has to fill all of them."""
        self.memory = TRAIN
        """Which memory is on the device."""
        self.step_open = False
        """Whether gradients are being accumulated for a step that is not taken yet."""
        self.gather_pending = False
        """Whether the gather of the last step's parameters can still be pending."""
        self.steps = 0
        """How many optimizer steps were taken, also before a resume."""
        self.awaits_weights = awaits_weights
        """Whether no load has filled the weights yet."""
        self.closed = False
        """Whether the policy has been shut down."""
        self._users: list[str] = []
        self._loading = ""

    @property
    def user(self) -> str:
        """Who uses the weights now, such as "the reference policy"; empty if nobody does."""
        return self._users[-1] if self._users else ""

    def check(self, operation: str, need: Requirement, *, repairs: bool = False) -> None:
        """ConfigError unless the state permits `operation`, such as "train()".

        CheckpointError if a load has left the weights half changed, unless the operation
        `repairs` them.
        """
        if self.closed:
            raise ConfigError(
                f"{operation}: this policy was shut down, and its process groups are gone: make a "
                "new one"
            )
        if self._loading and not repairs:
            raise CheckpointError(
                f"{operation} would use weights that are partly old and partly new: "
                f"{self._loading}. Call load_checkpoint() again"
            )
        if self.step_open and not need.within_step:
            raise ConfigError(f"{operation} has to wait: {STEP_OPEN}")
        check_permits(self.memory, operation, need)
        if need.alone and self._users:
            raise ConfigError(f"{operation} has to wait until {self.user} has ended")

    def check_can_enter(self, target: MemoryState) -> None:
        """ConfigError while something uses the weights, or if this would lose the gradients of an
        open step.
        """
        if self.closed:
            raise ConfigError(
                f"the policy cannot go to the {target.name} state: it was shut down, make a new one"
            )
        if self._users:
            raise ConfigError(
                f"the policy cannot go to the {target.name} state while {self.user} is running; it "
                f"stays {self.memory} until {self.user} finishes"
            )
        if self.step_open and Kind.GRADIENTS not in target.holds:
            raise ConfigError(
                f"the {target.name} state would lose gradients: {STEP_OPEN}. To score in between, "
                "call prepare_for_lp_inference(keep_train_buffers=True)"
            )

    def enter(self, memory: MemoryState) -> None:
        """Record that memory has been moved, after `check_can_enter`: whole, or as far as it went
        before it failed.
        """
        self.memory = memory

    @contextmanager
    def in_use(self, by: str) -> Iterator[None]:
        """In this context no memory is moved: `by` (e.g. "the reference policy") uses weights."""
        self._users.append(by)
        try:
            yield
        finally:
            self._users.remove(by)

    def begin_step(self, operation: str) -> None:
        """Gradients are accumulated from now on. ConfigError while a step is open."""
        if self.step_open:
            raise ConfigError(f"{operation} has to wait: {STEP_OPEN}")
        self.step_open = True

    def end_step(self, operation: str) -> None:
        """The open step has been taken or dropped. ConfigError if none is open."""
        if not self.step_open:
            raise ConfigError(
                f"{operation}: no training step is open, call begin_train_step() first"
            )
        self.step_open = False

    def expect_gather(self) -> None:
        """The optimizer changes the parameters; their gather overlaps what follows."""
        self.gather_pending = True

    def count_step(self) -> None:
        """The optimizer has taken a step."""
        self.expect_gather()
        self.steps += 1

    def settle(self) -> None:
        """The parameters are complete."""
        self.gather_pending = False

    def begin_load(self, what: str) -> None:
        """The weights are being replaced: until `end_load` they are unusable."""
        self._loading = f"the load of {what} was not finished"

    def close(self) -> None:
        """The policy has been shut down: everything is refused from now on."""
        self.closed = True

    def fill(self) -> None:
        """The load has read all weights."""
        assert self._loading, "no load has begun"
        self.awaits_weights = False

    def end_load(self) -> None:
        """The load is complete."""
        assert self._loading, "no load has begun"
        self._loading = ""
