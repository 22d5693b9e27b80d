"""Greedy answers of several caches to one batch of prompts, and how far each is from the full cache."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from .methods import Prefill, bytes_per_token, prefill_cache
from .samples import Sample


@dataclass(frozen=True)
class Answer:
    """What a method made of a sample.

    Attributes:
        tokens: the answer's ids, without what ended it.
        kl: mean KL(full || method) after the tokens of full's answer that are fed, the method fed the same ones; None
            if there is none.
        bytes: held for this row once the prompt was in: its share of the batch's, by tokens.
        bytes_bf16: of the same K and V as bf16.
    """

    tokens: list[int]
    kl: float | None
    bytes: float
    bytes_bf16: int


class Decoder:
    """A model that reads a batch of prompts once and answers with several caches."""

    def __init__(self, model: PreTrainedModel, pad_id: int):
        self.model = model
        self.pad_id = pad_id
        eos = model.generation_config.eos_token_id
        self.eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        # The argument's name changed in Transformers.
        named = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    @torch.no_grad()
    def answer(self, batch: list[Sample], methods: dict[str, Callable[[Prefill], Cache]]) -> dict[str, list[Answer]]:
        """By method, an answer for every sample of the batch. The first step is the prefill's, the same for all."""
        ids, mask = self._pad(batch)
        cache = prefill_cache()
        logits = self._forward(ids, mask, cache, logits_to_keep=1)
        prefill = Prefill(cache, self.model.config)
        per_token = cache.stats().bytes_bf16 // int(mask.sum())
        for row, sample in enumerate(batch):
            if sample.stop_ids:  # such an answer may not be empty
                logits[row, [*self.eos_ids, *sample.stop_ids]] = -torch.inf
        run = _Run(self, mask, logits.argmax(-1), batch)
        full = None
        answers = {}
        for name in sorted(methods, key=lambda name: name != "full"):  # the others are compared to it
            cache = methods[name](prefill)
            held = bytes_per_token(cache, mask)
            played = run.follow(cache, full)
            full = played if name == "full" else full
            answers[name] = [
                Answer(tokens, kl, held * len(sample.input_ids), per_token * len(sample.input_ids))
                for sample, tokens, kl in zip(batch, played.tokens, played.kl)
            ]
        return answers

    def step(self, cache: Cache, mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log probabilities `[batch, vocabulary]` after one more token a row; `mask` includes it."""
        attention = getattr(cache, "attention", None)
        before = self.model.config._attn_implementation
        if attention:
            self.model.set_attn_implementation(attention)
        try:
            logits = self._forward(tokens[:, None], mask, cache)
        finally:
            if attention:
                self.model.set_attn_implementation(before)
        return logits.float().log_softmax(-1)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache, **kwargs) -> torch.Tensor:
        """The last token's logits."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        padded = mask if (mask == 0).any() else None
        kwargs[self._cache_argument] = cache
        return self.model(input_ids=ids, attention_mask=padded, position_ids=positions, **kwargs).logits[:, -1]

    def _pad(self, batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(len(sample.input_ids) for sample in batch)
        ids = torch.full((len(batch), length), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(batch):
            ids[row, length - len(sample.input_ids) :] = torch.tensor(sample.input_ids)
            mask[row, length - len(sample.input_ids) :] = 1
        return ids.to(self.model.device), mask.to(self.model.device)


@dataclass
class _Played:
    """A method's decode: answers, KL by row, and for the full cache what it said.

    Attributes:
        fed: tokens fed at each step, `[batch]` each.
        log_probs: after each, `[batch, vocabulary]`.
    """

    tokens: list[list[int]]
    kl: list[float | None]
    fed: list[torch.Tensor]
    log_probs: list[torch.Tensor]


class _Run:
    """One batch's decodes. A method is fed its own tokens, and full's where these differ, in a copy of its cache."""

    def __init__(self, decoder: Decoder, mask: torch.Tensor, first: torch.Tensor, batch: list[Sample]):
        self.decoder, self.mask, self.first, self.batch = decoder, mask, first, batch
        self.stops = [{*decoder.eos_ids, *sample.stop_ids} for sample in batch]

    def follow(self, cache: Cache, full: _Played | None) -> _Played:
        """Decodes greedily with `cache`; with full's decode to compare to, takes KL on the way."""
        own = _Played([[] for _ in self.batch], [None] * len(self.batch), [], [])
        divergences = [[] for _ in self.batch]
        shared = full is not None
        tokens, mask, step = self.first, self.mask, 0
        while not self._append(own.tokens, tokens):
            if shared and step == len(full.fed):
                shared = False
            elif shared and not self._same(full, step, tokens):
                self._compare(copy.deepcopy(cache), mask, full, step, divergences)
                shared = False
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            log_probs = self.decoder.step(cache, mask, tokens)
            if full is None:
                own.fed.append(tokens)
                own.log_probs.append(log_probs)
            elif shared:
                self._diverge(full, step, log_probs, divergences)
            tokens, step = log_probs.argmax(-1), step + 1
        if shared:  # the answer ended where full's may go on
            self._compare(cache, mask, full, step, divergences)
        if full is not None:
            own.kl = [sum(row) / len(row) if row else None for row in divergences]
        return own

    def _append(self, answers: list[list[int]], tokens: torch.Tensor) -> bool:
        """Adds a token to every answer that goes on; whether all have ended."""
        ended = True
        for answer, token, stops, sample in zip(answers, tokens.tolist(), self.stops, self.batch):
            going = len(answer) < sample.max_new_tokens and not (answer and answer[-1] is None)
            if going:
                answer.append(None if token in stops else token)
                going = answer[-1] is not None and len(answer) < sample.max_new_tokens
            ended &= not going
        if ended:
            for answer in answers:
                if answer and answer[-1] is None:
                    answer.pop()
        return ended

    def _same(self, full: _Played, step: int, tokens: torch.Tensor) -> bool:
        """Whether rows whose full answer goes on are fed full's token at this step."""
        return all(
            step >= len(answer) or ours == theirs
            for answer, ours, theirs in zip(full.tokens, tokens.tolist(), full.fed[step].tolist())
        )

    def _compare(self, cache: Cache, mask: torch.Tensor, full: _Played, first_step: int, divergences: list) -> None:
        """Feeds the rest of full's answers."""
        for step in range(first_step, len(full.fed)):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            log_probs = self.decoder.step(cache, mask, full.fed[step])
            self._diverge(full, step, log_probs, divergences)

    def _diverge(self, full: _Played, step: int, log_probs: torch.Tensor, divergences: list) -> None:
        truth = full.log_probs[step]
        kl = (truth.exp() * (truth - log_probs)).sum(-1).clamp_min(0)
        for row, (answer, sample) in enumerate(zip(full.tokens, self.batch)):
            if step < min(len(answer), sample.max_new_tokens - 1):  # the last token of a longest answer is not fed
                divergences[row].append(float(kl[row]))
