//! Snapshots of volumes.

mod audit;
mod check;
mod creation;
mod late;
mod model;
mod pages;
mod reads;
mod restored;
mod storm;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::fence::VolumeFence;
use threefs_core::ids::InodeId;
use threefs_kv::Store;

use crate::fences::Fences;
use crate::ops::view;
use crate::protocol::{
    At, Inode, InodeKind, MetaChange, MetaQuery, MetaReply, MetaResult, SnapshotAnswer,
    SnapshotChange, SnapshotEntry, SnapshotQuery,
};
use crate::tests::fixture::Fixture;
use crate::tests::invariants::all_rows;

/// Fences that are late, fail, and remember what was raised.
#[derive(Default)]
pub(super) struct TestFences {
    pub raised: Mutex<Vec<VolumeFence>>,
    pub enabled: AtomicBool,
    pub fail: AtomicBool,
    /// Raises wait while this is set.
    pub hold: AtomicBool,
    pub waiting: AtomicUsize,
}

impl Fences for TestFences {
    fn enable(&self, _deadline: Deadline) -> BoxFuture<'_, Result<(), String>> {
        self.enabled.store(true, SeqCst);
        Box::pin(std::future::ready(Ok(())))
    }

    fn raise<'a>(
        &'a self,
        fence: &'a VolumeFence,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            self.waiting.fetch_add(1, SeqCst);
            while self.hold.load(SeqCst) {
                tokio::task::yield_now().await;
            }
            self.waiting.fetch_sub(1, SeqCst);
            if self.fail.load(SeqCst) {
                return Err("no service confirms".into());
            }
            let mut raised = self.raised.lock().unwrap();
            if let Some(before) = raised.iter().rfind(|it| it.volume == fence.volume) {
                assert_eq!(before.epoch.volume, fence.epoch.volume);
            }
            raised.push(fence.clone());
            Ok(())
        })
    }
}

pub(super) fn create_snapshot(path: &str, name: &str) -> MetaChange {
    MetaChange::Snapshot(SnapshotChange::Create { at: At::path(path), name: name.into() })
}

pub(super) fn remove_snapshot(path: &str, name: &str) -> MetaChange {
    MetaChange::Snapshot(SnapshotChange::Remove { at: At::path(path), name: name.into() })
}

pub(super) fn set_quota(path: &str) -> MetaChange {
    MetaChange::SetQuota { at: At::path(path), bytes_max: None, inodes_max: None }
}

impl Fixture {
    pub(super) async fn volume(&self, path: &str) -> InodeId {
        let inode = self.make_directory(path).await;
        self.change(set_quota(path)).await.unwrap();
        inode.id
    }

    pub(super) async fn snapshot(&self, path: &str, name: &str) -> MetaResult {
        self.change(create_snapshot(path, name)).await
    }

    pub(super) async fn snapshots(&self, path: &str) -> Vec<SnapshotEntry> {
        let query = SnapshotQuery::List { at: At::path(path) };
        match self.query(MetaQuery::Snapshot(query)).await.unwrap() {
            MetaReply::Snapshot(SnapshotAnswer::List(entries)) => entries,
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn names(&self, path: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        loop {
            let after = names.last().cloned().unwrap_or_default();
            let list = MetaQuery::List { at: At::path(path), after, limit: 2 };
            let MetaReply::Page { entries, more } = self.query(list).await.unwrap() else {
                panic!("no page")
            };
            names.extend(entries.into_iter().map(|entry| entry.name));
            if !more {
                return names;
            }
        }
    }

    /// Everything that a reader sees below a directory: inodes and attributes by path.
    pub(super) async fn everything(&self, base: &str) -> BTreeMap<String, Seen> {
        let (mut seen, mut open) = (BTreeMap::new(), vec![String::new()]);
        while let Some(path) = open.pop() {
            let full = format!("{base}{path}");
            let stat = MetaQuery::Stat { at: At::path(&full), follow: false };
            let MetaReply::Inode(inode) = self.query(stat).await.unwrap() else {
                panic!("no inode")
            };
            if inode.is_directory() {
                let names = self.names(&full).await;
                open.extend(names.iter().map(|name| format!("{path}/{name}")));
            }
            let mut attributes = BTreeMap::new();
            let list = MetaQuery::ListAttributes { at: At::path(&full) };
            let MetaReply::Names(names) = self.query(list).await.unwrap() else {
                panic!("no names")
            };
            for name in names {
                let get = MetaQuery::GetAttribute { at: At::path(&full), name: name.clone() };
                let MetaReply::Attribute(value) = self.query(get).await.unwrap() else {
                    panic!("no attribute")
                };
                attributes.insert(name, value);
            }
            let chunks = (0..8).map(|chunk| chunk * 3).collect();
            let stat = MetaQuery::StatChunks { at: At::path(&full), chunks };
            let MetaReply::Inode(chunks) = self.query(stat).await.unwrap() else {
                panic!("no inode")
            };
            let chunks = match chunks.kind {
                InodeKind::File { written, .. } => written.iter().collect(),
                _ => Vec::new(),
            };
            seen.insert(path, Seen { inode: as_live(inode), attributes, chunks });
        }
        seen
    }
}

/// What a reader sees of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    inode: Inode,
    attributes: BTreeMap<String, Vec<u8>>,
    chunks: Vec<(u32, u32)>,
}

/// An inode with the numbers that it has outside of a snapshot.
fn as_live(mut inode: Inode) -> Inode {
    inode.id = view::raw(inode.id);
    if let InodeKind::Directory { parent, .. } = &mut inode.kind {
        *parent = match inode.quota == Some(inode.id) {
            // Of the root of a volume.
            true => InodeId(0),
            false => view::raw(*parent),
        };
    }
    inode
}

/// Rows of the history and of snapshots.
pub(super) async fn history_rows(store: &Store) -> Vec<String> {
    let prefixes = ["HINO", "HDEN", "HXAT", "HWRI", "HEND", "SNAP", "SNNM", "SNRE"];
    let names = |key: &[u8]| prefixes.iter().any(|prefix| key.starts_with(prefix.as_bytes()));
    let rows = all_rows(store).await.into_iter().filter(|(key, _)| names(key));
    rows.map(|(key, _)| String::from_utf8_lossy(&key).escape_debug().to_string()).collect()
}
