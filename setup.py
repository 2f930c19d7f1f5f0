"""What pyproject.toml cannot say: a line that Python runs at its start, beside the package."""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# See megatron_policy/hosts/nemo_rl/autoload.py. Without the variable it is this one look-up.
LEAVE_OUT = "MEGATRON_POLICY_NO_START_LINE"
"""A variable that, if it is not empty when the package is built, leaves the line out."""
NAME = "megatron_policy_nemo_rl.pth"
LINE = (
    'import os; os.environ.get("NEMO_RL_MEGATRON_BACKEND") and __import__('
    '"megatron_policy.hosts.nemo_rl.autoload", fromlist=["watch"]).watch()\n'
)


class BuildWithLine(build_py):
    """Puts the line at the root of site-packages, of a wheel and of an editable install."""

    def run(self) -> None:
        super().run()
        if os.environ.get(LEAVE_OUT):
            return
        # To be edited, the package is not copied to build_lib; what is written there is not taken.
        editable = self.get_finalized_command("install").install_lib
        root = Path(editable if self.editable_mode else self.build_lib)
        root.mkdir(parents=True, exist_ok=True)
        (root / NAME).write_text(LINE)


setup(cmdclass={"build_py": BuildWithLine})
