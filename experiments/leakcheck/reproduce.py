"""List the steps that make the records, and the README's headline numbers."""

from experiments.reproduce import Headline, Step

TAKES = "16 minutes on one core"
STEPS = [Step("leakcheck.yaml", small=("only=[llama,mamba,jamba]",), packages=("transformers", "trl"))]
ARGUMENTS = {
    "position_ids": "position_ids",
    "+ seq_idx": "position_ids+seq_idx",
    "+ cu_seq_lens_q": "position_ids+cu_seq_lens_q",
    "+ both": "position_ids+seq_idx+cu_seq_lens_q",
    "TRL's collator": "trl",
    "attention_mask": "attention_mask",
}
HEADLINES = [
    Headline(f"{title}: {verdict}", "audit-counts", {"argument": argument}, verdict)
    for title, argument in ARGUMENTS.items()
    for verdict in ("tight", "leaks", "leaks and ignores it", "refuses", "patched and tight")
]
