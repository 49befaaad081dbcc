"""PackMamba's models under lm-evaluation-harness (0.4.13, extra ``[eval]``).

Importing this module registers the model as ``packmamba``; an instance can be passed to ``lm_eval.simple_evaluate`` as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from packmamba.evaluation.generation import go_on
from packmamba.evaluation.scoring import check_ids, score
from packmamba.nn import MambaLM

MAX_NEW_TOKENS = 256
"""Where a task does not say ``max_gen_toks``, as in the harness' own classes."""


@register_model("packmamba")
class PackMambaLM(TemplateLM):
    """Scores and generates packed: results depend on neither the order nor the batch of requests.

    Args:
        pretrained: a checkpoint's folder (state-spaces' or Hugging Face's format), or a MambaLM.
        tokenizer: a folder or name for transformers' AutoTokenizer, or an object with ``encode``, ``decode`` and
            ``eos_token_id``; None: the checkpoint's folder.
        max_slots: slots of a forward pass, which bound the memory.
        batch_size: accepted and not used: packing fills passes.
        device: where the model computes; None: a GPU if there is one. Of a MambaLM: None leaves it where it is.
        dtype: of the weights, such as "bfloat16"; None: the checkpoint's.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        pretrained: str | Path | MambaLM,
        tokenizer: Any = None,
        max_slots: int = 16384,
        batch_size: int | str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, MambaLM):
            model = pretrained
        else:
            model = MambaLM.from_pretrained(pretrained)
            if device is None:
                device = "cuda" if torch.cuda.is_available() else "cpu"
        if tokenizer is None and isinstance(pretrained, MambaLM):
            raise ValueError("tokenizer: expected one beside a MambaLM, got None")
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not isinstance(wanted, torch.dtype):
            raise ValueError(f"dtype: expected a name such as bfloat16, got {dtype!r}")
        self.model = model.to(device=device, dtype=wanted).eval()
        self.tokenizer = _load_tokenizer(pretrained if tokenizer is None else tokenizer)
        if self.tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: expected one with an end-of-text token (eos_token_id), got None")
        self.max_slots = int(max_slots)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context stands for: the begin token if there is one, else the end of a text."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        asked = [pair for pair in pairs if pair[1]]
        found = iter(score(self.model, asked, self.max_slots, progress=None if not disable_tqdm else False))
        answers: list[tuple[float, bool]] = [
            tuple(next(found)) if continuation else (0.0, True)  # type: ignore[misc]
            for _, continuation in pairs
        ]
        for (key, _, _), answer in zip(requests, answers):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts after the begin token: there is no longest text, so none is cut into windows."""
        texts = [request.args[0] for request in requests]
        asked = [(None, [self.prefix_token_id], self.tok_encode(text)) for text in texts]
        values = [value for value, _ in self._loglikelihood_tokens(asked, disable_tqdm)]
        for text, value in zip(texts, values):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return values

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        texts = [""] * len(requests)
        for places in groups.values():
            contexts = [requests[i].args[0] for i in places]
            for i, text in zip(places, self._generate(contexts, dict(requests[places[0]].args[1]))):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        until = options.pop("until", None) or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = options.pop("max_gen_toks", options.pop("max_new_tokens", MAX_NEW_TOKENS))
        temperature, top_p = float(options.pop("temperature", 0.0) or 0.0), float(options.pop("top_p", 1.0))
        if not options.pop("do_sample", temperature > 0):
            temperature = 0.0
        if options:
            raise ValueError(
                f"generation_kwargs: expected until, max_gen_toks, temperature, top_p or do_sample, got {sorted(options)}"
            )
        vocab_size = len(self.model.lm_head.weight)
        encoded = [
            check_ids(self.tok_encode(context) or [self.prefix_token_id], "context", vocab_size) for context in contexts
        ]

        def ended(i: int, tokens: list[int]) -> bool:
            return tokens[-1] == self.eot_token_id or any(stop in self.tok_decode(tokens) for stop in stops)

        found = []
        for tokens in go_on(self.model, encoded, int(most), temperature, top_p, ended, 0, self.max_slots):
            text = self.tok_decode(tokens[:-1] if tokens[-1] == self.eot_token_id else tokens)
            for stop in stops:
                text = text.split(stop)[0]
            found.append(text)
        return found


def _load_tokenizer(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer: {tokenizer} holds none that transformers can load ({error})") from None
