"""Packing: from document lengths to rows of pieces, by a strategy (numpy only)."""

from packmamba.data.packing.plan import OVERLONG, PackingPlan, Piece, Row, plan_rows
from packmamba.data.packing.strategies import STRATEGIES, Integers, Strategy

__all__ = ["OVERLONG", "STRATEGIES", "Integers", "PackingPlan", "Piece", "Row", "Strategy", "plan_rows"]
