# SPDX-License-Identifier: Apache-2.0
"""Placeholders are put where they belong, and found where they were put."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.multimodal.processing import (
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.multimodal.processing.processor import (
    apply_text_matches,
    apply_token_matches,
    find_mm_placeholders,
    iter_token_matches,
    replace_token_matches,
)

IMAGE, TEXT = 100, 101  # what stands in a prompt for an item
tokens = st.lists(st.integers(0, 3), max_size=12)


class WordTokenizer:
    """A token a word."""

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return "".join(f"{token} " for token in ids)


def bind(updates, counts):
    return {
        modality: [[u.resolve(i) for u in updates if u.modality == modality] for i in range(count)]
        for modality, count in counts.items()
    }


@given(tokens, st.lists(st.integers(0, 3), max_size=3))
def test_matches_are_all_there_and_do_not_overlap(ids, wanted):
    matches = list(iter_token_matches(ids, wanted))
    assert all(ids[m.start_idx : m.end_idx] == wanted for m in matches)
    assert all(a.end_idx <= b.start_idx for a, b in zip(matches, matches[1:], strict=False))
    text, part = bytes(ids), bytes(wanted)
    assert len(matches) == (text.count(part) if wanted else 0)
    replaced = replace_token_matches(ids, wanted, [9, 9])
    assert bytes(replaced) == (text.replace(part, bytes([9, 9])) if wanted else text)


@given(st.lists(st.sampled_from(["image", "text", "word"]), max_size=8), st.data())
def test_every_item_stands_where_its_mark_was(order, data):
    """Fault: the second image takes the first one's place; a placeholder of one modality is taken
    for one of another, or for the words between."""
    counts = {m: order.count(m) for m in ("image", "text")}
    sizes = {m: data.draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
             for m, n in counts.items()}  # fmt: skip
    updates = [
        PromptReplacement("image", [IMAGE], lambda i: [50] * sizes["image"][i]),
        PromptReplacement("text", [TEXT], lambda i: [60] * sizes["text"][i] + [61]),
    ]
    prompt = [{"image": IMAGE, "text": TEXT, "word": 7}[kind] for kind in order]
    bound = bind(updates, counts)
    ids, made = apply_token_matches(prompt, bound, None)
    assert made == {m: [0] * n for m, n in counts.items()}

    expected, ranges = [], {"image": [], "text": []}
    for kind in order:
        if kind == "word":
            expected.append(7)
            continue
        size = sizes[kind][len(ranges[kind])]
        content = [50] * size if kind == "image" else [60] * size + [61]
        ranges[kind].append((len(expected), len(content)))
        expected += content
    assert ids == expected
    found = find_mm_placeholders(ids, bound, None)
    spots = {m: [(f.start_idx, f.length) for f in infos] for m, infos in found.items()}
    assert spots == {m: r for m, r in ranges.items() if r}


def test_insertions_at_the_ends_and_behind_a_prefix():
    prompt = [1, 2, 3]
    for target, expected in [
        (PromptIndexTargets.start(), [9, 1, 2, 3]),
        (PromptIndexTargets.prefix([1, 2]), [1, 2, 9, 3]),
        (PromptIndexTargets.prefix([2]), [1, 2, 3]),
        (PromptIndexTargets.end(), [1, 2, 3, 9]),
        ([2], [1, 2, 9, 3]),
    ]:
        bound = bind([PromptInsertion("image", target, [9])], {"image": 1})
        assert apply_token_matches(prompt, bound, None)[0] == expected


def test_an_item_without_a_place_is_told():
    bound = bind([PromptReplacement("image", [IMAGE], [9])], {"image": 2})
    ids, made = apply_token_matches([1, IMAGE], bound, None)
    assert ids == [1, 9] and made == {"image": [0, None]}
    assert len(find_mm_placeholders(ids, bound, None)["image"]) == 1


def test_the_first_change_that_matches_is_made():
    updates = [PromptReplacement("image", [8], [5]), PromptReplacement("image", [IMAGE], [6])]
    ids, made = apply_token_matches([IMAGE], bind(updates, {"image": 1}), None)
    assert ids == [6] and made == {"image": [1]}


def test_texts_and_token_ids_stand_for_each_other():
    tokenizer = WordTokenizer()
    bound = bind([PromptReplacement("image", "7 ", "5 5 ")], {"image": 1})
    assert apply_token_matches([1, 7], bound, tokenizer)[0] == [1, 5, 5]
    assert apply_text_matches("1 7 2 ", bound, tokenizer)[0] == "1 5 5 2 "
    by_id = bind([PromptReplacement("image", [7], [5, 5])], {"image": 1})
    assert apply_text_matches("1 7 2 ", by_id, tokenizer)[0] == "1 5 5 2 "
    with pytest.raises(ValueError, match="needs a tokenizer"):
        apply_token_matches([1, 7], bound, None)


def test_some_tokens_of_a_placeholder_take_no_embedding():
    """Fault: a line break among an image's tokens gets an embedding that belongs to the next."""
    tokenizer = WordTokenizer()
    for details in [
        PromptUpdateDetails.select_token_id([5, 6, 5], 5),
        PromptUpdateDetails.select_token_ids([5, 6, 5], [5, 4]),
        PromptUpdateDetails.select_text([5, 6, 5], "5"),
    ]:
        bound = bind([PromptReplacement("image", [IMAGE], details)], {"image": 1})
        (info,) = find_mm_placeholders([1, 5, 6, 5], bound, tokenizer)["image"]
        position = info.to_range()
        assert (position.offset, position.length, position.get_num_embeds()) == (1, 3, 2)
        assert position.extract_embeds_range() == [(1, 1), (3, 3)]
