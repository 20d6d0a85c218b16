"""Differentiating epilogues and programs.  Imports `ir` only.

derivative  what a derivation gives
rules       the derivative of every op, a line each
graph       the expressions rules are written in
seeds       where cotangents begin: at stores, reductions and stateful transforms
flow        the walk that applies the rules
save        which forward values the backward loads
cut         the cheapest set of them
epilogue    `derive`: epilogue -> derived epilogue
program     `derive_program`: program -> derived program; the files program_* are its parts
"""

from codalang.autodiff.derivative import Decision, Derivative, Load
from codalang.autodiff.epilogue import derive
from codalang.autodiff.program import derive_program
from codalang.autodiff.program_derivative import ProgramDerivative

__all__ = ["Decision", "Derivative", "Load", "ProgramDerivative", "derive", "derive_program"]
