"""PackMamba's models in lm-evaluation-harness (extra ``[eval]``).

Importing this module registers the model type ``packmamba``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from packmamba.errors import expect, refusing
from packmamba.evaluation.generation import generate
from packmamba.evaluation.scoring import score
from packmamba.nn import MambaLM


@register_model("packmamba")
class PackMambaLM(TemplateLM):
    """Score and generate packed: same results whatever the order and batch of requests.

    Args:
        pretrained: a checkpoint's folder, or a MambaLM.
        tokenizer: for transformers' AutoTokenizer, or an object with ``encode``, ``decode`` and
            ``eos_token_id``; None: ``pretrained``.
        device: None: a folder's model on a GPU if there is one.
    """

    def __init__(
        self,
        pretrained: str | Path | MambaLM,
        tokenizer: Any = None,
        max_slots: int = 16384,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        # which the harness gives
        unknown = sorted(others.keys() - {"batch_size", "max_batch_size"})
        expect(not unknown, "model_args", "pretrained, tokenizer, max_slots, device or dtype", unknown)
        if not isinstance(pretrained, MambaLM):
            tokenizer = pretrained if tokenizer is None else tokenizer
            pretrained = MambaLM.from_pretrained(pretrained)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(tokenizer, (str, Path)):
            from transformers import AutoTokenizer

            refused = f"tokenizer: transformers loads none from {tokenizer} ("
            with refusing(OSError, ValueError, prefix=refused, suffix=")"):
                tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        ends = getattr(tokenizer, "eos_token_id", None) is not None
        expect(ends, "tokenizer", "one with eos_token_id", f"{tokenizer!r:.60}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.model, self.tokenizer = pretrained.to(device=device, dtype=dtype).eval(), tokenizer
        self.max_slots = int(max_slots)

    @property
    def eot_token_id(self) -> int:
        """Return the tokenizer's end-of-text token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that replaces an empty context."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text."""
        begin = getattr(self.tokenizer, "bos_token", None)
        # A chat template has written the begin token already.
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _loglikelihood_tokens(self, requests: Any, *further: Any, **others: Any) -> list[tuple[float, bool]]:
        prefix = [self.prefix_token_id]  # in place of a context of spaces, which the harness moves
        pairs = [(context or prefix, continuation) for _, context, continuation in requests if continuation]
        scores = iter(score(self.model, pairs, self.max_slots))
        answers: list[Any] = []
        for key, _, continuation in requests:
            # An empty continuation has probability 1.
            answers.append(tuple(next(scores)) if continuation else (0.0, True))
            if key is not None:  # None: of rolling scores, cached by their caller
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts after one begin token, uncut."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        keyless = [(None, [self.prefix_token_id], tokens) for tokens in texts]
        values = [value for value, _ in self._loglikelihood_tokens(keyless)]
        for request, value in zip(requests, values):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return values

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate greedily or by temperature until a stop string, prompts packed."""
        texts = [""] * len(requests)
        # Requests with equal options are generated together.
        keys = [repr(sorted(request.args[1].items())) for request in requests]
        for one in set(keys):
            places = [i for i, key in enumerate(keys) if key == one]
            contexts = [requests[i].args[0] for i in places]
            for i, text in zip(places, self._generate(contexts, requests[places[0]].args[1])):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _generate(self, contexts: list[str], arguments: dict[str, Any]) -> list[str]:
        given = {name: value for name, value in arguments.items() if value is not None}
        options = dict(normalize_gen_kwargs(given))
        stops = [stop for stop in options.pop("until") if stop]
        count = options.pop("max_gen_toks")
        temperature = float(options.pop("temperature", 0.0)) * bool(options.pop("do_sample"))
        nucleus = options.pop("top_p", 1.0)
        known = "until, max_gen_toks, temperature, top_p or do_sample"
        expect(not options, "generation_kwargs", known, sorted(options))
        prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        # By text, since a stop string's tokens depend on what precedes it; it may be a special token.
        whole = lambda tokens: self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        ends = lambda tokens: any(stop in whole(tokens) for stop in stops)
        more: Any = {"max_slots": self.max_slots, "stop": ends}
        sampling = (temperature, nucleus if temperature else 1.0)
        generated = generate(self.model, prompts, count, *sampling, self.eot_token_id, **more)
        return [postprocess_generated_text(self.tok_decode(tokens), stops, None) for tokens in generated]
