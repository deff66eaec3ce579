//! A store of the release before epochs opens with the same content, and continues.

#![allow(clippy::unwrap_used)]

mod support;

use support::MemoryDisk;
use threefs_chunkstore::disk::{Disk, DiskFile};
use threefs_chunkstore::{ChunkStore, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::ids::{
    ChainVersion, ChannelId, ChunkId, ChunkVersion, ClientId, Epoch, InodeId, RequestTag, StoreId,
};

/// The log that the release wrote: one frame in each 4 KiB block, here without the zeros at its end.
const FRAMES: &[&str] = &[
    "4c534633060000000100000000000000e97f33280000000002000000054d",
    "4c534633060000000200000000000000a2e12c0d000000000200000007",
    "4c5346332b000000030000000000000054241f950000000027000000060700010205ccf6c6d309000180\
     8080805003010101000101ccf6c6d3090100010568656c6c6f",
    "4c5346333400000004000000000000007989329b00000000050000000107000102270000000607000202\
     0590b5f0b705000180808080500302020101010190b5f0b7050101010548456c6c6f",
    "4c534633380000000500000000000000b7efb4f4000000000500000001070002022b00000006ac028001\
     090207e8baf9940b0001808080805003090901020101e8baf9940b0102010770656e64696e67",
    "4c5346332e00000006000000000000004616c475000000002a0000000608ffffffff0f040204f2d3d2b8\
     060001808080805003040401000101f2d3d2b80601000104676f6e65",
    "4c534633280000000700000000000000ca661a6600000000090000000108ffffffff0f04021700000000\
     08ffffffff0f0502000001018080808050030505",
    "4c5346333a0000000800000000000000160ae39d00000000090000000108ffffffff0f05022900000006\
     09010302078a9098810300018080808050030303010301018a909881030103010764726f70706564",
    "4c534633170000000900000000000000d474128200000000050000000109010302020000000706040000\
     0004010909",
    "4c5346332f0000000a00000000000000d285f44f000000002b000000060a01030209b6a9f8eb06000180\
     8080805003030301000101b6a9f8eb0601000109666f72676f7474656e",
    "4c534633100000000b0000000000000046db90270000000005000000010a01030203000000020a01",
];

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
    digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()
}

fn former_disk() -> MemoryDisk {
    let disk = MemoryDisk::default();
    let log = disk.open("log-00000001").unwrap();
    for (frame, at) in FRAMES.iter().zip((0..).step_by(4096)) {
        let mut block = bytes_of(frame);
        block.resize(4096, 0);
        log.write_at(&block, at).unwrap();
    }
    disk
}

fn tags(sequence: u64) -> TagWindow {
    let (client, channel) = (ClientId(5 << 32), ChannelId(3));
    TagWindow::default().with(RequestTag { client, channel, sequence }, ChunkVersion(sequence))
}

fn read(store: &FileChunkStore<MemoryDisk>, chunk: ChunkId, which: Which) -> Vec<u8> {
    store.read(chunk, which, 0, u32::MAX).unwrap().bytes
}

#[test]
fn a_store_of_the_former_release_opens_and_continues_in_a_later_epoch() {
    let disk = former_disk();
    let store = FileChunkStore::open_on(disk.clone(), StoreConfig::default()).unwrap();
    assert_eq!(store.id(), StoreId(77));
    let (written, removed) = (ChunkId::new(InodeId(7), 0), ChunkId::new(InodeId(8), u32::MAX));
    let pending = ChunkId::new(InodeId(300), 128);
    let metas = store.metas(None, ChunkId::MAX, 9);
    let ids: Vec<ChunkId> = metas.iter().map(|meta| meta.chunk).collect();
    assert_eq!(ids, [written, removed, pending]);
    assert_eq!(read(&store, written, Which::Committed), b"HEllo");
    assert_eq!(metas[0].committed.tags, tags(2));
    assert!(metas[1].committed.removed && metas[1].committed.version == ChunkVersion(5));
    assert_eq!(read(&store, pending, Which::Newest), b"pending");
    assert_eq!(metas[2].committed.version, ChunkVersion(0));
    assert!(store.is_forgotten(InodeId(9)) && !store.is_forgotten(InodeId(10)));
    assert_eq!(store.version_floor(), ChunkVersion(6));

    let later = written.in_epoch(Epoch::new(1, 1));
    let (version, chain_version) = (ChunkVersion(3), ChainVersion(2));
    let change = ContentChange::Replace;
    let update = StoreUpdate { chunk: later, version, chain_version, tags: tags(3), change };
    store.apply(&update, b"later").unwrap();
    store.commit(later, version, chain_version).unwrap();
    drop(store);
    let store = FileChunkStore::open_on(disk, StoreConfig::default()).unwrap();
    assert_eq!(read(&store, written, Which::Committed), b"HEllo");
    assert_eq!(read(&store, later, Which::Committed), b"later");
    assert_eq!(store.version_up_to(written.last_version()).unwrap().chunk, later);
}
