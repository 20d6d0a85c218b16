"""The typed intermediate representation.  Imports nothing of the rest of codalang but `errors`.

types      shape kinds, widths, dtypes
ops        the one table of operations
epilogue   Epilogue, Param, Node, Store, Reduce, State, Keep
infer      the type of an op's result
build      EpilogueBuilder, canonical order
verify     checks any epilogue, however it was made; verify_nodes, verify_state
simplify   folding, common subexpressions, dead code
printer    IR -> valid .coda text; graph_text: values and their names
module     what one source file defines and imports
states     StateDef, Function: stateful transforms
builtin_states  those that every program knows
reference  runs an epilogue with torch: whole, tile by tile, in f32, f64 or rounding mode
bind, evaluate, fold  its parts: the call, what every op means, reductions
"""
