"""Where things lie, and the two ways a scenario can end without passing."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VM_TESTS = ROOT / "vm-tests"
CACHE = Path(os.environ.get("RIMROCK_TEST_CACHE", ROOT / ".cache"))


class Failure(Exception):
    """Something that had to hold did not."""


class Skip(Exception):
    """The machine lacks what the scenario needs; the text says what."""


def check(condition, message):
    """Fail the scenario with `message` unless `condition` holds."""
    if not condition:
        raise Failure(message)
