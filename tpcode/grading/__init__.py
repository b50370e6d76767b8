"""Checks that an exercise calls: run the learner's code on real ranks, compare with the dense layer, say what is wrong.

from tpcode.grading import check

check("0.1", add_up)
"""

from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.registry import check, exercise, require_checked

__all__ = ["Unfilled", "Wrong", "check", "exercise", "require_checked"]
