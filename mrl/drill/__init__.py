"""Fault drills: `mrl drill RECIPE` provokes faults in runs of a recipe, on the machine to train on."""

from mrl.drill.chain import FEWEST_LEFT, NUM_STEPS, Drill
from mrl.drill.faults import FAULTS, NOT_PROVOKED, Fault, Row, never
from mrl.drill.table import HEADER, drill, not_provoked, table_rows

__all__ = [
    "FAULTS",
    "FEWEST_LEFT",
    "HEADER",
    "NOT_PROVOKED",
    "NUM_STEPS",
    "Drill",
    "Fault",
    "Row",
    "drill",
    "never",
    "not_provoked",
    "table_rows",
]
