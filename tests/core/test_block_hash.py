"""Which prompts share KV blocks, and which must not."""

from __future__ import annotations

from dataclasses import replace

from aioengine.core.block_hash import extend_digests
from aioengine.core.block_pool import BlockPool
from aioengine.core.plan import Limits
from aioengine.core.request import Request
from tests.support.world import IMAGES, Image, make_request

A, B, C, D, E = IMAGES[:5]
SIZE = 4


def digests(*parts: int | Image, **options: object) -> list[bytes]:
    return extend_digests(make_request("r", list(parts), **options), SIZE)


def pool_of(num_blocks: int, num_groups: int = 1) -> BlockPool:
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    return BlockPool(Limits(**sizes, block_size=SIZE, num_blocks=num_blocks, num_groups=num_groups))


def test_equal_prompts_agree_block_by_block() -> None:
    assert digests(1, 2, 3, 4, 5, 6, 7, 8) == digests(1, 2, 3, 4, 5, 6, 7, 8)
    one, two = digests(1, 2, 3, 4, 5, 6, 7, 8), digests(1, 2, 3, 4, 5, 6, 7, 0)
    assert one[0] == two[0] and one[1] != two[1]


def test_a_block_depends_on_all_before_it() -> None:
    assert digests(1, 2, 3, 4, 5, 6, 7, 8)[1] != digests(0, 2, 3, 4, 5, 6, 7, 8)[1]


def test_images_are_told_apart_by_content() -> None:
    other = replace(A, key="other")
    assert digests(1, A, 1)[0] != digests(1, other, 1)[0]
    assert digests(1, A, 1) == digests(1, A, 1)


def test_where_a_image_begins_matters() -> None:
    """Equal ids in the block, but another row of the image at each position."""
    wide = Image("w", 9, ((0, 9),), 3)
    one = make_request("r", [wide])
    two = replace_offset(one, -1)
    assert extend_digests(one, SIZE)[1] != extend_digests(two, SIZE)[1]


def replace_offset(request: Request, by: int) -> Request:
    item = request.items[0]
    moved = replace(item, span=replace(item.span, offset=item.span.offset + by))
    return Request(
        request_id="r",
        prompt_token_ids=request.prompt_token_ids,
        items=(moved,),
        stop=request.stop,
    )


def test_salts_keep_tenants_apart() -> None:
    plain, one, two = (digests(1, 2, 3, 4, cache_salt=salt) for salt in (None, "one", "two"))
    assert len({plain[0], one[0], two[0]}) == 3


def test_a_range_that_sees_itself_depends_on_all_its_content() -> None:
    """The range reaches beyond the block; what is there changes the block's KV."""
    one = make_request("r", [1, 1, E, 1])
    two = make_request("r", [1, 1, replace(E, key="other"), 1])
    assert extend_digests(one, SIZE)[0] != extend_digests(two, SIZE)[0]


def test_a_hit_may_be_all_of_a_prompt_and_checks_the_ids() -> None:
    pool = pool_of(8)
    first = make_request("one", [1, 2, 3, 4, 5, 6, 7, 8])
    first.block_tables = [pool.allocate(2)]
    first.num_computed = 8
    pool.publish(first)
    assert pool.num_cached == 2
    same = make_request("two", [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.find_prefix(same)[0] == first.block_tables[0]
    longer = make_request("three", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.find_prefix(longer)[0] == first.block_tables[0]
    forged = make_request("four", [1, 2, 3, 0, 5])
    forged.digests = list(first.digests)  # a collision, as it were
    assert pool.find_prefix(forged)[0] == []


def test_requests_that_read_no_prefix() -> None:
    pool = pool_of(8)
    first = make_request("one", [1, 2, 3, 4, 5])
    first.block_tables = [pool.allocate(2)]
    first.num_computed = 5
    pool.publish(first)
    assert pool.find_prefix(make_request("two", [1, 2, 3, 4, 5], reads_prefix=False)) == [[]]


def test_all_groups_must_have_the_block() -> None:
    pool = pool_of(8, num_groups=2)
    first = make_request("one", [1, 2, 3, 4, 5])
    first.block_tables = [pool.allocate(2), pool.allocate(2)]
    first.num_computed = 5
    pool.publish(first)
    again = make_request("two", [1, 2, 3, 4, 5])
    assert [len(table) for table in pool.find_prefix(again)] == [1, 1]
    pool.release(first.block_tables[0])
    pool.release(first.block_tables[1])
    pool.allocate(7)  # evicts one of the two cached blocks
    assert pool.find_prefix(again) == [[], []]


def test_the_least_recently_used_block_goes_first_and_tails_before_heads() -> None:
    pool = pool_of(3)
    first = make_request("one", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    first.block_tables = [pool.allocate(3)]
    first.num_computed = 9
    pool.publish(first)
    pool.release(first.block_tables[0])
    pool.check()
    pool.allocate(2)  # the unused third block, then the cached second
    assert len(pool.find_prefix(make_request("two", [1, 2, 3, 4, 5, 6, 7, 8, 9]))[0]) == 1


def test_clear_forgets_content_and_keeps_references() -> None:
    pool = pool_of(4)
    first = make_request("one", [1, 2, 3, 4, 5])
    first.block_tables = [pool.allocate(2)]
    first.num_computed = 5
    pool.publish(first)
    pool.clear()
    pool.check()
    assert pool.num_cached == 0 and pool.num_free == 2
    pool.release(first.block_tables[0])
    assert pool.num_free == 4
