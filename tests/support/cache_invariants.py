"""The invariants of a paged cache and of its pool of blocks, and what is kept of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.model.paged.blocks import BlockPool
from paceline.model.paged.cache import PagedCache


def check_cache(cache: PagedCache) -> None:
    """Assert that no block is lost, doubled or shared without being registered."""
    tables = cache._tables.values()
    check_pool(cache.pool, [table.blocks for table in tables])
    assert all(len(table.digests) <= len(table.blocks) for table in tables)
    if cache.states is not None:
        assert cache.states._slots.keys() == cache._tables.keys()
        slots = [list(slots.values()) for slots in cache.states._slots.values()]
        assert all(len(owned) <= 1 for owned in slots), "a state outlives its step"
        check_pool(cache.states.pool, [*slots, [cache.states.zero]])


def check_pool(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Against the tables of all sequences that own blocks."""
    owners = [0] * pool.total
    for table in tables:
        assert len(set(table)) == len(table), "a block appears twice in one table"
        for block in table:
            owners[block] += 1
    assert owners == pool._refs, "reference counts differ from the block tables"
    used = {block for block, count in enumerate(owners) if count}
    assert not used & pool._free.keys() and not used & pool._reusable.keys()
    assert not pool._free.keys() & pool._reusable.keys()
    assert len(used) + len(pool._free) + len(pool._reusable) == pool.total, "blocks leaked"
    assert {d: b for b, d in pool._digest.items()} == pool._by_digest
    assert all(block in pool._digest for block in pool._reusable)
    shared = {block for block, count in enumerate(owners) if count > 1}
    assert shared <= pool._digest.keys(), "a block with unknown content is shared"


def kept(things: Any, ids: set[int], path: str, seen: set[int]) -> Iterator[str]:
    """Where objects of ours keep something by one of these sequences' ``ids``."""
    if id(things) in seen:
        return
    seen.add(id(things))
    if isinstance(things, PagedCache):
        check_cache(things)
        things = things._tables
    if isinstance(things, dict):
        if ids & things.keys():
            yield path
        inner = [(f"{path}[{key!r:.20}]", value) for key, value in list(things.items())[:50]]
    elif isinstance(things, list | tuple):
        inner = [(f"{path}[{number}]", value) for number, value in enumerate(things[:50])]
    elif isinstance(things, set | frozenset):
        if ids & things:
            yield path
        return
    elif str(type(things).__module__).startswith("paceline.") and hasattr(things, "__dict__"):
        inner = [(f"{path}.{name}", value) for name, value in vars(things).items()]
    else:
        return
    for name, value in inner:
        yield from kept(value, ids, name, seen)
