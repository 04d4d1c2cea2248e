import random
import tracemalloc

from scheduler.router.prefixes import ENDS, PrefixTable, block_keys, bytes_known


def text(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_blocks_are_close_together_at_the_beginning_and_end_at_a_mebibyte() -> None:
    assert ENDS[:6] == (256, 512, 768, 1024, 2048, 3072)
    assert ENDS[-1] == 1024 * 1024
    assert len(ENDS) == 4 + 7 + 14 + 60


def test_prompts_have_keys_in_common_as_far_as_they_begin_alike() -> None:
    begin = text(1, 5000)
    one, other = block_keys(begin + text(2, 4000), 0, 7), block_keys(begin + text(3, 9000), 0, 7)
    shared = [a == b for a, b in zip(one, other, strict=False)]
    assert shared == [True] * 7 + [False] * (len(one) - 7)  # 256, 512, 768, 1024, 2048, 3072, 4096


def test_what_comes_before_the_prompt_does_not_count() -> None:
    prompt = text(1, 3000)
    assert block_keys(b"any" + prompt, 3, 7) == block_keys(prompt, 0, 7)


def test_of_a_long_block_the_end_is_looked_at() -> None:
    prompt = text(1, 20_000)
    elsewhere = prompt[:9_000] + b"?" + prompt[9_001:]  # in the block from 8,192 to 12,288, far from its end
    at_the_end = prompt[:12_000] + b"?" + prompt[12_001:]
    assert block_keys(elsewhere, 0, 7) == block_keys(prompt, 0, 7)
    shared = [a == b for a, b in zip(block_keys(at_the_end, 0, 7), block_keys(prompt, 0, 7), strict=True)]
    assert shared == [True] * 11 + [False] * 2  # 4 by 256, 7 by 1,024; then 12,288 and 16,384


def test_a_short_prompt_has_no_key() -> None:
    assert block_keys(text(1, 255), 0, 7) == []


def test_under_another_seed_no_key_is_the_same() -> None:
    prompt = text(1, 20_000)
    assert not set(block_keys(prompt, 0, 1)) & set(block_keys(prompt, 0, 2))


def test_who_has_how_much() -> None:
    table = PrefixTable(1_000_000)
    keys = [11, 12, 13, 14]
    table.note(keys[:2], 0b01)
    table.note(keys[:3], 0b10)
    levels = table.find(keys, 0b11)
    assert levels == [(2, 0b11), (3, 0b10)]
    assert [bytes_known(levels, bit) for bit in (0b01, 0b10, 0b100)] == [512, 768, 0]
    assert table.find(keys, 0b01) == [(2, 0b01)]  # the other one may not be asked now
    assert table.find([99, 11], 0b11) == []  # a block behind one that nobody has is of no use


def test_the_table_keeps_its_bound_and_what_was_used_of_late() -> None:
    table = PrefixTable(200_000)
    entries_max = 200_000 // 180
    for number in range(0, 5000, 10):
        table.note(list(range(number, number + 10)), 1)
        table.note([-1], 1)  # used all the time
        assert len(table) <= entries_max + 11
    assert table.find([-1], 1)
    assert table.find([4999], 1)
    assert not table.find([0], 1)


def test_the_bound_is_true_in_bytes() -> None:
    bound, prompt = 2_000_000, text(1, 6000)
    tracemalloc.start()
    try:
        table = PrefixTable(bound)
        before = tracemalloc.get_traced_memory()[0]
        for seed in range(4000):
            table.note(block_keys(prompt, 0, seed), 1 << seed % 64)
        assert tracemalloc.get_traced_memory()[0] - before < bound
    finally:
        tracemalloc.stop()
