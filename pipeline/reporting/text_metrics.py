"""Text metrics of one output, by the reference implementations: rouge-score and sacrebleu."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import NamedTuple

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.chrf import CHRF

NGRAM = 4  # tokens or words; a loop of any period repeats its n-grams


class Overlap(NamedTuple):
    """How much of a reference an output shares, each from 0 to 1."""

    rouge1: float  # F-measure of words, stemmed
    rouge2: float  # of pairs of words
    rouge_l: float  # of the longest common subsequence
    chrf: float  # chrF2: F-measure of character n-grams, recall counting twice


def overlap(text: str, reference: str) -> Overlap:
    """Overlap of an output with a reference; two empty texts share everything."""
    if not text.strip() and not reference.strip():
        return Overlap(1.0, 1.0, 1.0, 1.0)
    rouge = _rouge().score(reference, text)
    chrf = _chrf().sentence_score(text, [reference]).score / 100
    return Overlap(rouge["rouge1"].fmeasure, rouge["rouge2"].fmeasure, rouge["rougeL"].fmeasure, chrf)


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L alone: F-measure of the longest common subsequence of words."""
    return overlap(text, reference).rouge_l


def repetition(tokens: Sequence[Hashable]) -> float:
    """Share of n-grams, of tokens or words, that the output already contained; 0 where it is shorter than an n-gram."""
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@cache
def _rouge() -> RougeScorer:
    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


@cache
def _chrf() -> CHRF:
    return CHRF()
