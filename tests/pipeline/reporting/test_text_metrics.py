"""Metrics say what their names say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from pipeline.reporting.text_metrics import overlap, repetition, unsupported


def test_a_text_overlaps_itself_wholly_and_a_stranger_not_at_all() -> None:
    assert overlap("A fast mail server.", "A fast mail server.") == pytest.approx((1, 1, 1, 1))
    assert overlap("zzz", "A fast mail server.") == pytest.approx((0, 0, 0, 0))
    assert overlap("", "A fast mail server.") == pytest.approx((0, 0, 0, 0))
    assert overlap("", " ") == (1, 1, 1, 1)


def test_rouge_is_an_f_measure_of_words_in_order() -> None:
    found = overlap("the cat sat", "the cat on the mat sat")
    assert found.rouge1 == pytest.approx(2 * 1 * (3 / 6) / (1 + 3 / 6))
    assert found.rouge2 == pytest.approx(2 * (1 / 2) * (1 / 5) / (1 / 2 + 1 / 5))
    assert found.rouge_l == pytest.approx(found.rouge1)
    assert overlap("sat cat the", "the cat on the mat sat").rouge_l < found.rouge_l


def test_texts_without_a_word_share_all_or_nothing() -> None:
    assert overlap("★★★★☆", "★★★★☆") == (1, 1, 1, 1)
    assert overlap("👍", "?") == (0, 0, 0, 0)


def test_vowels_that_are_marks_are_part_of_their_words() -> None:
    assert overlap("काला", "कीली").rouge_l == 0
    assert overlap("हिन्दी में किताबें", "हिन्दी में किताबें").rouge2 == 1
    assert repetition("वह घर के पास है। वे घर के पीछे हैं, और वो घर की ओर हैं।") == 0


@pytest.mark.parametrize(
    "text", ["Собака лает громко.", "犬が吠える。", "الكلب ينبح بصوت عال", "개가 크게 짖는다.", "Ça a été naïf."]
)
def test_words_of_any_script_overlap(text: str) -> None:
    assert overlap(text, text) == (1, 1, 1, 1)
    assert overlap(text, "Two dogs.").rouge_l == 0


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=12),
    st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12),
)
def test_the_longest_common_subsequence_is_rouge_scores(words: list[str], wanted: list[str]) -> None:
    text, reference = " ".join(words), " ".join(wanted)
    theirs = RougeScorer(["rougeL"]).score(reference, text)["rougeL"].fmeasure
    assert overlap(text, reference).rouge_l == pytest.approx(theirs if words or wanted else 1)


def test_only_runs_of_three_words_that_were_there_before_count_as_repeated() -> None:
    assert repetition("") == repetition("two words") == 0
    assert repetition(" ".join(f"w{i}" for i in range(20))) == 0
    assert repetition("a mail server, A Mail Server") == pytest.approx(1 / 4)
    assert repetition("go " * 20) == pytest.approx(1 - 1 / 18)
    assert repetition("tick tock " * 10) == pytest.approx(1 - 2 / 18)


def test_a_number_or_name_that_the_source_does_not_hold_is_counted_once() -> None:
    source = "exim4 is a mail server for Debian, first released in 1995 with 1,000 users."
    assert unsupported("A mail server for debian from 1995 for 1,000 users.", source) == []
    assert unsupported("A server for Fedora from 1996; Fedora ships it since 1996.", source) == ["Fedora", "1996"]
    assert unsupported("Exim5 is part of GNU.", source) == ["Exim5", "GNU"]
    assert unsupported("It has 5.2 and 95 users.", source) == ["5.2", "95"]  # 95 is not 1995


def test_a_capital_that_begins_a_sentence_makes_no_name() -> None:
    source = "a mail server"
    assert unsupported('Server. "Mail" it!\nThe - Server: I say.', source) == []
    assert unsupported("GNU mail. iOS mail - Foo", source) == ["GNU", "iOS", "Foo"]


def test_scripts_without_case_have_numbers_in_any_digits() -> None:
    assert unsupported("この本は２０１９年", "2018年の本") == ["2019"]
    assert repetition("この本この本") == pytest.approx(1 / 4)
    assert unsupported("٢٠١٩", "٢٠١٩") == []
    assert unsupported("هذا كتاب", "") == []
