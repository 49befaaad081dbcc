"""leakcheck: does anything cross a document boundary, in any causal language model? To the bit, forward and backward."""

from packmamba.isolation.check import leakcheck
from packmamba.isolation.result import LeakCheckResult, ModeResult

__all__ = ["LeakCheckResult", "ModeResult", "leakcheck"]
