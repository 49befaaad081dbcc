"""leakcheck: does anything cross a document boundary, in any causal language model? To the bit, forward and backward."""

from packmamba.isolation.check import LeakCheckResult, ModeResult, leakcheck

__all__ = ["LeakCheckResult", "ModeResult", "leakcheck"]
