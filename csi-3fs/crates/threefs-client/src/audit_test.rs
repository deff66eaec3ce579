//! Audits of real chains and a real tree: planted damage, and races with clients and the collector.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{Shutdown, ShutdownHandle};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_core::layout::Layout;
use threefs_meta::{ChunkTrimmer, DeadFile, Meta, MetaConfig, Pending, TreeConfig};

use crate::audit::AuditReport;
use crate::cluster_test::{Cluster, whole};
use crate::error::OperationName;
use crate::routing::ChunkLocation;
use crate::{Client, ClientConfig, WriteRange};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const LONG: Duration = Duration::from_secs(120);

fn key() -> Key {
    Key::from_bytes(&[7; 32]).unwrap()
}

/// Three storage services, mgmtd and meta.
pub(crate) struct WithTree {
    cluster: Cluster,
    meta: String,
    _folder: tempfile::TempDir,
    _alive: ShutdownHandle,
}

impl WithTree {
    /// Removed files are collected as soon as possible.
    pub(crate) async fn start() -> Self {
        let cluster = Cluster::of_three(64 << 20).await;
        let folder = tempfile::tempdir().unwrap();
        whole(&cluster.client()).await;
        let trimmer = Arc::new(Trimmer(OnceLock::new()));
        let times = TreeConfig { gc_delay_ms: 1, gc_interval_ms: 1, ..TreeConfig::default() };
        let config = MetaConfig {
            listen: "127.0.0.1:0".into(),
            key: key().into(),
            tls: fabric::tls::ServiceTls::default(),
            store: threefs_meta::StoreConfig::folder(folder.path().join("meta")),
            mgmtd: vec![cluster.mgmtd.clone()],
            tree: TreeConfig { dead_grace_ms: 1, ..times },
        };
        let meta = Meta::open(config, Arc::clone(&trimmer) as _).await.unwrap();
        let address = meta.address().to_string();
        assert!(trimmer.0.set(cluster.client_of(&address)).is_ok());
        let (alive, shutdown) = Shutdown::new();
        tokio::spawn(meta.serve(shutdown));
        Self { cluster, meta: address, _folder: folder, _alive: alive }
    }

    pub(crate) fn client(&self) -> Client {
        let (mgmtd, meta) = (vec![self.cluster.mgmtd.clone()], vec![self.meta.clone()]);
        Client::start(ClientConfig { timeout: LONG, ..ClientConfig::new(mgmtd, meta, key()) })
    }
}

/// The storage client of the metadata service, which asks that service for the epochs of volumes. Its
/// address is not known when it is opened.
struct Trimmer(OnceLock<Client>);

impl ChunkTrimmer for Trimmer {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        pending: Pending,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        self.0.get().unwrap().trim(inode, layout, range, pending, deadline)
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        self.0.get().unwrap().forget(files, deadline)
    }

    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        ChunkTrimmer::stored_end(self.0.get().unwrap(), inode, layout, range, deadline)
    }
}

pub(crate) async fn change(
    client: &Client,
    location: ChunkLocation,
    change: ContentChange,
    data: &[u8],
) {
    let (what, data): (OperationName, _) = ("test".into(), Bytes::from(data.to_vec()));
    client.update(&what, location, change, data, Deadline::after(LONG)).await.unwrap();
}

/// The chain of a chunk of a file.
pub(crate) async fn located(client: &Client, path: &str, index: u32) -> ChunkLocation {
    let what: OperationName = "test".into();
    let (file, deadline) = (client.open(path).await.unwrap(), Deadline::after(LONG));
    let offset = u64::from(index) * u64::from(file.layout.chunk_bytes);
    client.locate(&what, &file, offset, 1, deadline).await.unwrap()[0].location
}

pub(crate) fn write(path: &str, offset: u64, bytes: usize) -> WriteRange {
    WriteRange { path: path.into(), offset, payload: Bytes::from(vec![7; bytes]) }
}

pub(crate) async fn audited(client: &Client, remove: bool) -> AuditReport {
    let mut audit = client.audit().await.unwrap();
    while audit.step().await.unwrap() {}
    while remove && audit.find_paths().await.unwrap() {}
    while remove && audit.remove_leaked().await.unwrap() {}
    assert_eq!(audit.report().not_read, BTreeMap::new());
    audit.report().clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaked_and_missing_chunks_are_found_and_holes_are_not() {
    let tree = WithTree::start().await;
    let client = tree.client();
    let chunk_bytes = {
        client.batch_write(vec![write("/whole", 0, 3 * MIB as usize)], true).await.unwrap();
        client.open("/whole").await.unwrap().layout.chunk_bytes
    };
    let size = u64::from(chunk_bytes);
    // Holes: never written, punched by a truncation, and a short chunk inside the file.
    client.batch_write(vec![write("/sparse", 9 * size, 5)], true).await.unwrap();
    let sparse = client.open("/sparse").await.unwrap();
    client.set_length(&sparse, 2 * size + 1).await.unwrap();
    client.set_length(&sparse, 99 * size).await.unwrap();
    // More ranges than an inode lists.
    client.mkdir("/directory", false).await.unwrap();
    let ranges: Vec<_> =
        (0..600).map(|number| write("/directory/ranges", number * 2 * size, 1)).collect();
    client.batch_write(ranges, true).await.unwrap();
    assert!(client.stat("/directory/ranges", true).await.is_ok());

    let intact = audited(&client, true).await;
    assert_eq!((intact.leaked.chunks, intact.missing_chunks), (0, 0), "{intact:?}");
    assert_eq!(intact.removed.chunks, 0);

    // Inodes of a tree that was lost, between and beyond those of this one.
    let leaked = [InodeId(0), InodeId(1 << 39)];
    for inode in leaked {
        for (chain, index) in [(1, 0), (1, 70_000), (2, 1)] {
            let chunk = ChunkId::new(inode, index);
            let location = ChunkLocation { chain: ChainId(chain), chunk, chunk_bytes };
            change(&client, location, ContentChange::Write { offset: 0 }, &[1; 100]).await;
        }
    }
    let lost = [
        ("/whole", 1),
        ("/directory/ranges", 0),
        ("/directory/ranges", 600),
        ("/directory/ranges", 1198),
    ];
    for (path, index) in lost {
        change(&client, located(&client, path, index).await, ContentChange::Remove, &[]).await;
    }
    let found = audited(&client, false).await;
    let leaks: Vec<_> = found.leaks().map(|(inode, leak)| (inode, leak.chunks)).collect();
    assert_eq!(leaks, leaked.map(|inode| (inode, 3)));
    assert_eq!(found.missing_chunks, 4, "{found:?}");
    assert_eq!(found.missing[0].path, None);
    let indexes: Vec<&[u32]> = found.missing.iter().map(|file| &file.indexes[..]).collect();
    assert_eq!(indexes, [&[1][..], &[0, 600, 1198]]);
    assert_eq!(found.missing_files, 2);

    let removed = audited(&client, true).await;
    assert_eq!(removed.removed, removed.leaked);
    assert_eq!((removed.leaked.inodes, removed.leaked.bytes), (2, 600));
    let paths: Vec<_> = removed.missing.iter().map(|file| file.path.as_deref()).collect();
    assert_eq!(paths, [Some("/whole"), Some("/directory/ranges")]);
    let after = audited(&client, false).await;
    assert_eq!((after.leaked.chunks, after.missing_chunks), (0, 4));
    assert_eq!(after.chunks, intact.chunks - 4);
}

/// A worker that creates, replaces, truncates, renames and removes files, and reads back each
/// of them. Returns what it has left.
async fn work(client: Client, worker: u64, ended: Arc<AtomicBool>) -> BTreeMap<String, Vec<u8>> {
    let mut random = StdRng::seed_from_u64(worker);
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut number = 0;
    while !ended.load(SeqCst) {
        number += 1;
        let path = format!("/{worker}-{number}");
        let bytes = random.random_range(1..2 * MIB as usize);
        let mut content = vec![random.random(); bytes];
        let range = WriteRange { path: path.clone(), offset: 0, payload: content.clone().into() };
        client.batch_write(vec![range], true).await.unwrap();
        let file = client.open(&path).await.unwrap();
        if random.random_bool(0.5) {
            for _ in 0..2 {
                let length = random.random_range(0..2 * MIB as usize);
                client.set_length(&file, length as u64).await.unwrap();
                content.resize(length, 0);
            }
        }
        let length = content.len() as u64;
        let read = client.read_range(&file, 0, length, Deadline::after(LONG)).await.unwrap();
        assert!(read.concat() == content, "{path} has other bytes than were written");
        let renamed = format!("{path}-renamed");
        client.rename(&path, &renamed).await.unwrap();
        files.insert(renamed, content);
        if files.len() > 3
            && let Some((path, _)) = files.pop_first()
        {
            client.unlink(&path).await.unwrap();
        }
    }
    files
}

/// With files that are created, written, truncated and removed all the time, no audit reports a leaked
/// or missing chunk, and a repair without any grace period removes nothing of a file that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_removes_nothing_that_clients_create_meanwhile() {
    const AUDITS: usize = 25;
    let tree = WithTree::start().await;
    let (client, ended) = (tree.client(), Arc::new(AtomicBool::new(false)));
    let workers: Vec<_> = (0..3)
        .map(|worker| tokio::spawn(work(tree.client(), worker, Arc::clone(&ended))))
        .collect();
    let (mut inodes, mut chunks) = (0, 0);
    for number in 0..AUDITS as u64 {
        // Something to remove in each audit.
        let chunk = ChunkId::new(InodeId((1 << 40) + number), 0);
        let location = ChunkLocation { chain: ChainId(1), chunk, chunk_bytes: MIB as u32 };
        change(&client, location, ContentChange::Write { offset: 0 }, &[1; 100]).await;
        let report = audited(&client, true).await;
        assert_eq!((report.removed.inodes, report.removed.chunks), (1, 1), "{report:?}");
        assert_eq!(report.missing_chunks, 0, "{report:?}");
        (inodes, chunks) = (inodes + report.inodes, chunks + report.chunks);
    }
    assert!(inodes > AUDITS as u64 && chunks > AUDITS as u64, "the workers have had files");
    ended.store(true, SeqCst);
    for worker in workers {
        for (path, content) in worker.await.unwrap() {
            let file = client.open(&path).await.unwrap();
            let length = content.len() as u64;
            let read = client.read_range(&file, 0, length, Deadline::after(LONG)).await.unwrap();
            assert!(read.concat() == content, "{path} has other bytes than were written");
        }
    }
    let report = audited(&client, false).await;
    assert_eq!((report.leaked.chunks, report.missing_chunks), (0, 0), "{report:?}");
}
