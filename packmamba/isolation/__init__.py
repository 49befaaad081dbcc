"""leakcheck: does anything cross a document boundary, in any causal language model? To the bit, forward and backward."""

from packmamba.isolation.check import LeakCheckResult, leakcheck

__all__ = ["LeakCheckResult", "leakcheck"]
