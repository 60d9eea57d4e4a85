"""Checks that every method passes, to run over one's own.

    for check in petal.checks.check_method(MyMethod):
        check()                     # returns, or raises CheckFailed or NotApplicable with the reason

They run on three tiny networks (batch norm, group norm, a transformer), by plain code and by the engine
(`petal.accelerate`), and need nothing else: what a constructor asks for (`posterior`, `statistics`) is made.
`petal check my.py` prints a table.
"""

from petal.checks import answers, learning, state
from petal.checks.factory import Factory
from petal.checks.networks import NETWORKS, images, network, networks
from petal.checks.suite import ENGINES, Check, CheckFailed, NotApplicable, check_method

__all__ = [
    "ENGINES", "NETWORKS", "Check", "CheckFailed", "Factory", "NotApplicable", "answers", "check_method", "images",
    "learning", "network", "networks", "state",
]  # fmt: skip
