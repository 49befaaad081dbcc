"""The laboratory: one configuration in, one record out; sweeps, tables and pages of many."""

from packmamba.errors import require

require("lightning", "torchmetrics")
