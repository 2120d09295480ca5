"""Graders of the worker's tests. A spawned worker imports them, so nothing heavy stands here."""

import os
import time

from bench.evaluation.graders import extract_boxed
from bench.evaluation.records import Problem, Verdicted


def obey(text: str, problem: Problem) -> Verdicted:
    """Does what the box says."""
    match extract_boxed(text):
        case "sleep":
            time.sleep(60)
        case "die":
            os._exit(3)
        case "raise":
            raise KeyError("no such thing")
    return Verdicted("right", str(os.getpid()))
