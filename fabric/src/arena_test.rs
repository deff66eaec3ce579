use super::*;

const MIB: usize = 1 << 20;

fn arena(bytes: usize) -> Arc<Arena> {
    Arc::new(Arena::create("arena-test", bytes).unwrap())
}

fn peer_of(arena: &Arena) -> Segment {
    let fd = arena.segment().fd().try_clone_to_owned().unwrap();
    Segment::open(fd, arena.segment().bytes()).unwrap()
}

#[test]
fn a_peer_reads_the_same_bytes_at_the_offset() {
    let arena = arena(8 * MIB);
    let peer = peer_of(&arena);
    let _other = arena.allocate(100).unwrap();
    let block = arena.allocate(5000).unwrap();
    // SAFETY: inside the block.
    unsafe { block.base().add(4999).write(9) };
    let location = arena.find(block.base(), 5000).unwrap();
    assert!(location.whole_pages);
    let there = peer.at(location.offset, 5000).unwrap();
    // SAFETY: inside the peer's map.
    assert_eq!(unsafe { there.add(4999).read() }, 9);
    assert!(peer.at(location.offset, 8 * MIB).is_none() && peer.at(u64::MAX, 2).is_none());
}

#[test]
fn only_ranges_within_one_block_are_located() {
    let arena = arena(MIB);
    let block = arena.allocate(3 * PAGE_BYTES + 10).unwrap();
    let next = arena.allocate(10).unwrap();
    let base = block.base().cast_const();
    assert!(arena.find(base, 3 * PAGE_BYTES + 11).is_none());
    assert!(arena.find(base, usize::MAX).is_none());
    let private = [0_u8; 8];
    assert!(arena.find(private.as_ptr(), 8).is_none());
    assert!(arena.find(next.base().wrapping_add(PAGE_BYTES), 1).is_none());
    let whole = |offset: usize, bytes| arena.find(base.wrapping_add(offset), bytes).unwrap();
    assert!(whole(PAGE_BYTES, PAGE_BYTES).whole_pages);
    assert!(whole(PAGE_BYTES, 2 * PAGE_BYTES + 10).whole_pages);
    assert!(!whole(64, PAGE_BYTES).whole_pages && !whole(0, 100).whole_pages);
}

#[test]
fn a_thousand_blocks_are_zeroed_and_merge_into_one_gap_when_freed() {
    let arena = arena(16 * MIB);
    let mut blocks = Vec::new();
    for round in 0..1000_usize {
        let bytes = 1 + (round * 7919) % (MIB / 4);
        let block = arena.allocate(bytes).unwrap();
        // SAFETY: inside the block.
        unsafe {
            assert_eq!((block.base().read(), block.base().add(bytes - 1).read()), (0, 0));
            block.base().write_bytes(255, bytes);
        }
        blocks.push(block);
        if blocks.len() > 20 {
            blocks.remove((round * 31) % 20);
        }
    }
    blocks.clear();
    assert_eq!(arena.used(), 0);
    assert_eq!(arena.blocks().free, [(0, 16 * MIB)].into());
    let pages = rustix::fs::fstat(arena.segment().fd()).unwrap().st_blocks;
    assert_eq!(pages, 0);
}

#[test]
fn the_error_of_a_full_arena_has_its_usage() {
    let arena = arena(4 * MIB);
    let _block = arena.allocate(3 * MIB).unwrap();
    let error = arena.allocate(2 * MIB).unwrap_err();
    assert_eq!(error, ArenaError::Full { requested: 2 * MIB, used: 3 * MIB, limit: 4 * MIB });
    assert!(arena.allocate(usize::MAX).is_err());
    assert!(Arena::create("arena-test", usize::MAX).is_err());
}

#[test]
fn revoked_memory_is_inaccessible_to_the_peer() {
    let arena = arena(4 * MIB);
    let peer = peer_of(&arena);
    let block = arena.allocate(2 * PAGE_BYTES + 100).unwrap();
    let other = arena.allocate(100).unwrap();
    let location = arena.find(block.base(), block.bytes()).unwrap();
    let adjacent = arena.find(other.base(), 100).unwrap();
    // SAFETY: inside the block, and the peer's map of it.
    unsafe {
        block.base().write(1);
        peer.at(location.offset, 1).unwrap().write(2);
        arena.revoke(location.offset, block.bytes()).unwrap();
        assert_eq!(block.base().read(), 2);
        peer.at(location.offset, 1).unwrap().write(3);
        peer.at(location.offset + 2 * PAGE_BYTES as u64, 100).unwrap().write_bytes(3, 100);
        assert_eq!(block.base().read(), 2);
        assert_eq!(block.base().add(2 * PAGE_BYTES).read(), 0);
        peer.at(adjacent.offset, 1).unwrap().write(4);
        assert_eq!(other.base().read(), 4);
    }
    assert!(arena.is_retired() && arena.find(other.base(), 1).is_none());
    assert_eq!(arena.allocate(1).unwrap_err(), ArenaError::Retired);
    drop((block, other));
    assert_eq!(arena.used(), 0);
    assert!(arena.revoke(1, 1).is_err() && arena.revoke(4 * MIB as u64, 1).is_err());
}

#[test]
fn a_delegated_arena_is_allocated_by_the_peer() {
    let arena = arena(MIB);
    arena.delegate();
    assert_eq!(arena.allocate(10).unwrap_err(), ArenaError::Retired);
    let peer = Arc::new(Arena::of(peer_of(&arena)));
    let _first = peer.allocate(10).unwrap();
    let block = peer.allocate(5000).unwrap();
    let place = arena.segment().at(block.offset() as u64, 5000).unwrap();
    let location = arena.find(place, 5000).unwrap();
    assert!(location.whole_pages && location.offset == block.offset() as u64);
    assert!(arena.find(place, MIB).is_none());
    // SAFETY: inside the segment, which both map.
    unsafe { place.write(9) };
    // SAFETY: inside the block.
    assert_eq!(unsafe { block.base().read() }, 9);
}
