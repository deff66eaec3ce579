//! Audits of a volume with snapshots: several versions of chunks, in the tree and in snapshots.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use fabric::deadline::Deadline;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threefs_core::chunk::ContentChange;
use threefs_core::fence::{VolumeEpoch, VolumeFence};
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_core::shown::ShownEpochs;
use threefs_meta::{MetaQuery, MetaReply};

use super::AuditReport;
use crate::Client;
use crate::audit_test::{LONG, MIB, WithTree, audited, change, located, write};
use crate::error::OperationName;
use crate::routing::ChunkLocation;

/// A volume with a file of three chunks.
async fn volume(client: &Client) -> InodeId {
    client.mkdir("/v", false).await.unwrap();
    client.set_quota("/v", None, None).await.unwrap();
    client.batch_write(vec![write("/v/file", 0, 3 * MIB as usize)], true).await.unwrap();
    client.stat("/v", true).await.unwrap().id
}

/// The volume with its epoch.
async fn place(client: &Client, inode: InodeId) -> VolumeEpoch {
    let query = MetaQuery::Epochs { inodes: vec![inode] };
    match client.0.metadata.query("test", query, Deadline::after(LONG)).await.unwrap() {
        MetaReply::Epochs(epochs) => epochs[0].unwrap(),
        other => panic!("{other:?}"),
    }
}

fn is_clean(report: &AuditReport) {
    assert_eq!((report.leaked.chunks, report.missing_chunks), (0, 0), "{report:?}");
    assert_eq!((report.removed.chunks, report.unconfirmed_chunks), (0, 0), "{report:?}");
}

/// The files with missing chunks: path, whether of a snapshot, and indexes.
fn missing(report: &AuditReport) -> Vec<(Option<&str>, Option<&str>, &[u32])> {
    report
        .missing
        .iter()
        .map(|it| (it.path.as_deref(), it.snapshot.as_deref(), &it.indexes[..]))
        .collect()
}

/// All replicas drop the versions that this list does not have, as if the list were right.
async fn hide_all(client: &Client, volume: InodeId) {
    let VolumeEpoch { epoch, .. } = place(client, volume).await;
    let shown = ShownEpochs { volume: epoch.volume, below: epoch.count, counts: BTreeSet::new() };
    let fence = VolumeFence { volume, epoch, shown };
    client.0.routing.mgmtd.raise_fence(fence, Deadline::after(LONG)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_with_snapshots_has_no_findings_and_losses_are_found() {
    let tree = WithTree::start().await;
    let client = tree.client();
    let volume = volume(&client).await;
    let again = || vec![write("/v/file", 0, 2 * MIB as usize)];
    client.batch_write(vec![write("/v/removed", 0, 100)], true).await.unwrap();
    client.create_snapshot("/v", "first").await.unwrap();
    client.unlink("/v/removed").await.unwrap();
    is_clean(&audited(&client, true).await);
    for name in ["second", "third"] {
        client.batch_write(again(), false).await.unwrap();
        client.create_snapshot("/v", name).await.unwrap();
    }
    client.batch_write(again(), false).await.unwrap();
    client.batch_write(vec![write("/v/new", 0, 100)], true).await.unwrap();
    client.remove_snapshot("/v", "second").await.unwrap();
    let intact = audited(&client, true).await;
    is_clean(&intact);
    // Chunks of three files; versions of two of them in three epochs.
    assert_eq!((intact.chunks, intact.leaked.bytes), (5, 0));
    assert!(intact.bytes >= 7 * MIB, "the versions of snapshots stay: {intact:?}");

    // The newest version of a chunk, which snapshots do not show.
    change(&client, located(&client, "/v/file", 1).await, ContentChange::Remove, &[]).await;
    let found = audited(&client, true).await;
    assert_eq!(missing(&found), [(Some("/v/file"), None, &[1][..])]);
    client.batch_write(again(), false).await.unwrap();
    is_clean(&audited(&client, true).await);

    // All versions of a file that only a snapshot shows.
    let removed = client.open("/v/.snapshots/first/removed").await.unwrap();
    let stored = InodeId(removed.inode.0 & ((1 << 55) - 1));
    let what: OperationName = "test".into();
    let chain = client.chains(&what, &removed.layout, Deadline::after(LONG)).await.unwrap()[0];
    let inodes = BTreeSet::from([stored]);
    client.forget_on(&what, chain, inodes, Deadline::after(LONG)).await.unwrap();
    let found = audited(&client, true).await;
    assert_eq!(missing(&found), [(None, Some("/v/.snapshots/first"), &[0][..])]);
    assert_eq!(found.missing[0].inode, removed.inode);
    assert_eq!((found.leaked.chunks, found.removed.chunks), (0, 0));

    // Versions that snapshots show, of chunks that the tree has.
    hide_all(&client, volume).await;
    let end = Deadline::after(LONG);
    let found = loop {
        let found = audited(&client, true).await;
        if found.missing_chunks >= 5 {
            break found;
        }
        assert!(!end.passed(), "{found:?}");
    };
    let (first, third) = (Some("/v/.snapshots/first"), Some("/v/.snapshots/third"));
    let mut lost = missing(&found);
    lost.sort_unstable();
    assert_eq!(lost, [(None, first, &[0][..]), (None, first, &[0, 1]), (None, third, &[0, 1])]);
    assert_eq!(found.leaked.chunks, 0);
    for name in ["first", "third"] {
        client.remove_snapshot("/v", name).await.unwrap();
    }
    is_clean(&audited(&client, true).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaked_chunks_with_several_versions_are_found_and_removed() {
    let tree = WithTree::start().await;
    let client = tree.client();
    let volume = volume(&client).await;
    // Adjacent inodes, and the highest chunk of a file.
    let leaked = [InodeId(1 << 39), InodeId((1 << 39) + 1)];
    for name in ["first", "second"] {
        client.create_snapshot("/v", name).await.unwrap();
        for inode in leaked {
            let place = place(&client, volume).await;
            client.0.metadata.places().learn(inode, place);
            for index in [0, u32::MAX] {
                let chunk = ChunkId::new(inode, index);
                let location = ChunkLocation { chain: ChainId(1), chunk, chunk_bytes: MIB as u32 };
                let write = ContentChange::Write { offset: 0 };
                change(&client, location, write, &[1; 100]).await;
            }
        }
    }
    let found = audited(&client, false).await;
    let leaks: Vec<_> = found.leaks().map(|(id, leak)| (id, leak.chunks, leak.bytes)).collect();
    assert_eq!(leaks, leaked.map(|inode| (inode, 2, 400)));
    let removed = audited(&client, true).await;
    assert_eq!((removed.removed, removed.missing_chunks), (found.leaked, 0));
    let after = audited(&client, true).await;
    is_clean(&after);
    assert_eq!(after.bytes, 3 * MIB, "the snapshots keep their versions");
}

/// A worker that changes files of the volume.
async fn work(client: Client, worker: u64, ended: Arc<AtomicBool>) {
    let mut random = StdRng::seed_from_u64(worker);
    let mut number = 0;
    while !ended.load(SeqCst) {
        number += 1;
        let path = format!("/v/{worker}-{}", number % 5);
        let bytes = random.random_range(1..3 * MIB as usize);
        client.batch_write(vec![write(&path, 0, bytes)], true).await.unwrap();
        match random.random_range(0..4) {
            0 => client.unlink(&path).await.unwrap(),
            1 => {
                let file = client.open(&path).await.unwrap();
                let length = random.random_range(0..3 * MIB);
                client.set_length(&file, length).await.unwrap();
            }
            _ => {}
        }
    }
}

/// Creates snapshots and removes them, in another order.
async fn snapshots(client: Client, ended: Arc<AtomicBool>) {
    let mut random = StdRng::seed_from_u64(9);
    let (mut names, mut number) = (Vec::new(), 0);
    while !ended.load(SeqCst) {
        number += 1;
        let name = format!("s{number}");
        client.create_snapshot("/v", &name).await.unwrap();
        names.push(name);
        if names.len() > 4 {
            let name = names.remove(random.random_range(0..names.len()));
            client.remove_snapshot("/v", &name).await.unwrap();
        }
    }
}

/// With files that change and snapshots that are created and removed all the time, an audit finds
/// nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audits_of_a_changing_volume_with_snapshots_have_no_findings() {
    const AUDITS: usize = 15;
    let tree = WithTree::start().await;
    let (client, ended) = (tree.client(), Arc::new(AtomicBool::new(false)));
    volume(&client).await;
    let mut tasks: Vec<_> = (0..2)
        .map(|worker| tokio::spawn(work(tree.client(), worker, Arc::clone(&ended))))
        .collect();
    tasks.push(tokio::spawn(snapshots(tree.client(), Arc::clone(&ended))));
    let made = async || client.snapshots("/v").await.unwrap().len();
    let end = Deadline::after(LONG);
    while made().await < 3 {
        assert!(!end.passed(), "no snapshots");
    }
    for _ in 0..AUDITS {
        is_clean(&audited(&client, true).await);
    }
    ended.store(true, SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
    is_clean(&audited(&client, true).await);
}
