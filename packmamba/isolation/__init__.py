"""leakcheck: does anything cross a document boundary, in any causal language model?"""

from packmamba.isolation.check import LeakCheckResult, leakcheck

__all__ = ["LeakCheckResult", "leakcheck"]
