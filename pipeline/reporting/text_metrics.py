"""Text metrics of one output: its overlap with a text, by the reference implementations (rouge-score and sacrebleu; the
longest common subsequence by rapidfuzz), what it repeats, and what it claims that its source does not hold."""

import unicodedata
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import regex
from rapidfuzz.distance import LCSseq
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer, Tokenizer
from sacrebleu.metrics.chrf import CHRF

NGRAM = 3  # words; a loop of any period repeats its n-grams
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # kana and ideographs: written without spaces, each is a word
# With the marks that are vowels in scripts of India; 1,000 and 2.5 are words too.
WORD = regex.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}])[\w\p{{M}}])+(?:[.,]\d+)*")
ENDS_SENTENCE = frozenset(".!?:;…。！？\n")  # noqa: RUF001
MARKS = " \t\"'“”‘’«»()[]{}<>*_#•–—-"  # noqa: RUF001 - may stand between the end of a sentence and the next word


class Overlap(NamedTuple):
    """How much of a reference an output shares, each from 0 to 1."""

    rouge1: float  # F-measure of words, stemmed
    rouge2: float  # of pairs of words
    rouge_l: float  # of the longest common subsequence
    chrf: float  # chrF2: F-measure of character n-grams, recall counting twice


def overlap(text: str, reference: str) -> Overlap:
    """Overlap of an output with a reference; texts without a word, empty ones among them, share all or nothing."""
    words, wanted = _TOKENS.tokenize(text), _TOKENS.tokenize(reference)
    if not words and not wanted:
        same = float(text.split() == reference.split())
        return Overlap(same, same, same, same)
    rouge = _ROUGE.score(reference, text)
    chrf = _CHRF.sentence_score(text, [reference]).score / 100
    # What rouge-score takes seconds to find for a few pages.
    longest = 2 * LCSseq.similarity(words, wanted) / (len(words) + len(wanted))
    return Overlap(rouge["rouge1"].fmeasure, rouge["rouge2"].fmeasure, longest, chrf)


def repetition(text: str) -> float:
    """Share of an output's runs of three words that it already held, whatever their case; 0 for less than three."""
    words = [word.casefold() for word, _ in _words(text)]
    ngrams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def unsupported(text: str, source: str) -> list[str]:
    """Numbers and names of an output that its source does not hold, each once, in the order they come.

    A number is a word with a digit. A name is one of two letters or more with a capital; the capital that begins a
    sentence does not count. The source holds a word that it has anywhere, whatever its case. So in scripts without
    case only numbers are found, German nouns are names, and a number in other notation or an inflected name is
    taken for a new one: figures mean something beside those of another output for the same source.
    """
    held = {word.casefold() for word, _ in _words(source)}
    claims = (word for word, begins in _words(text) if _is_claim(word, begins) and word.casefold() not in held)
    return list(dict.fromkeys(claims))


def _words(text: str) -> Iterator[tuple[str, bool]]:
    """Words, and whether each begins a sentence."""
    text = unicodedata.normalize("NFKC", text)
    end, begins = 0, True
    for found in WORD.finditer(text):
        between = text[end : found.start()].rstrip(MARKS)
        begins = not end or (bool(between) and between[-1] in ENDS_SENTENCE)
        yield found[0], begins
        end = found.end()


def _is_claim(word: str, begins_sentence: bool) -> bool:
    if any(character.isdigit() for character in word):
        return True
    return len(word) > 1 and any(character.isupper() for character in (word[1:] if begins_sentence else word))


class _AnyScript(Tokenizer):
    """rouge-score's own tokens of words in ASCII; it would drop all others, and an answer in Russian with them."""

    def __init__(self) -> None:
        self._ascii = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        found = (self._ascii.tokenize(word) if word.isascii() else [word.casefold()] for word, _ in _words(text))
        return list(chain.from_iterable(found))


_TOKENS = _AnyScript()
_ROUGE = RougeScorer(["rouge1", "rouge2"], tokenizer=_TOKENS)
_CHRF = CHRF()
