//! Test fixture: a tree with chains and a trimmer that records its calls.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ClientId, InodeId, TableVersion};
use threefs_core::layout::Layout;
use threefs_core::routing::{ChainTable, RoutingInfo};
use threefs_kv::{KeyRange, Store};
use tokio::sync::watch;

use crate::Identity;
use crate::RenameMode;
use crate::chunk_trimmer::{ChunkTrimmer, DeadFile, Pending};
use crate::config::TreeConfig;
use crate::fences::Fences;
use crate::protocol::{
    At, Inode, LayoutDefaults, MetaChange, MetaQuery, MetaReply, MetaRequest, MetaResult, RequestId,
};
use crate::tests::backends::Yielding;
use crate::tree::Tree;

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Records every trim and query; fails while `refuse` is set.
#[derive(Default)]
pub(crate) struct Recorder {
    pub trims: Mutex<Vec<(InodeId, u64)>>,
    /// Files that cannot be forgotten at present.
    pub unavailable: Mutex<Vec<InodeId>>,
    /// End of the file's chunks in trims and removals.
    pub ends: Mutex<Vec<(InodeId, u64)>>,
    pub refuse: AtomicBool,
    /// End of the stored bytes of files.
    pub stored_ends: Mutex<BTreeMap<InodeId, u64>>,
    /// The ranges of `stored_end` queries.
    pub queried_ranges: Mutex<Vec<(InodeId, Range<u64>)>>,
}

impl ChunkTrimmer for Recorder {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        _layout: &'a Layout,
        range: Range<u64>,
        _pending: Pending,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            if self.refuse.load(SeqCst) {
                return Err("storage is away".into());
            }
            self.trims.lock().unwrap().push((inode, range.start));
            self.ends.lock().unwrap().push((inode, range.end));
            Ok(())
        })
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        _deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        let forget = |file: &DeadFile| {
            let unavailable = self.unavailable.lock().unwrap().contains(&file.inode);
            if self.refuse.load(SeqCst) || unavailable {
                return Err("storage is away".into());
            }
            self.trims.lock().unwrap().push((file.inode, 0));
            self.ends.lock().unwrap().push((file.inode, file.end));
            Ok(())
        };
        Box::pin(std::future::ready(files.iter().map(forget).collect()))
    }

    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        _layout: &'a Layout,
        range: Range<u64>,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        self.queried_ranges.lock().unwrap().push((inode, range.clone()));
        let stored_end = self.stored_ends.lock().unwrap().get(&inode).copied().unwrap_or_default();
        let end = match self.refuse.load(SeqCst) {
            true => Err("storage is away".into()),
            false => Ok(stored_end.clamp(range.start, range.end)),
        };
        Box::pin(std::future::ready(end))
    }
}

/// A tree with one client.
pub(crate) struct Fixture {
    pub tree: Tree,
    pub store: Store,
    pub recorder: Arc<Recorder>,
    pub client: ClientId,
    sequence: AtomicU64,
}

impl Fixture {
    pub(crate) async fn memory() -> Self {
        Self::open(Store::memory(), config()).await
    }

    /// In memory, with transactions that interleave.
    pub(crate) async fn interleaving() -> Self {
        Self::open(Store::new(Yielding(Store::memory())), config()).await
    }

    pub(crate) async fn open(store: Store, config: TreeConfig) -> Self {
        let recorder = Arc::new(Recorder::default());
        let trimmer = Arc::clone(&recorder) as Arc<dyn ChunkTrimmer>;
        let tree = Tree::open(store.clone(), config, routing(), trimmer).await.unwrap();
        let client = ClientId(rand::random());
        Self { tree, store, recorder, client, sequence: AtomicU64::new(1) }
    }

    pub(crate) fn with_fences(self, fences: Arc<dyn Fences>) -> Self {
        Self { tree: self.tree.with_fences(fences), ..self }
    }

    pub(crate) fn next_id(&self) -> RequestId {
        let sequence = self.sequence.fetch_add(1, SeqCst);
        RequestId { client: self.client, sequence, finished_below: 0 }
    }

    pub(crate) async fn change(&self, change: MetaChange) -> MetaResult {
        self.tree
            .answer(
                MetaRequest::Change { id: self.next_id(), caller: Identity::ROOT, change },
                soon(),
            )
            .await
    }

    pub(crate) async fn query(&self, query: MetaQuery) -> MetaResult {
        self.tree.answer(MetaRequest::Query { caller: Identity::ROOT, query }, soon()).await
    }

    pub(crate) async fn stat(&self, path: &str) -> Result<Inode, crate::MetaError> {
        match self.query(MetaQuery::Stat { at: At::path(path), follow: true }).await? {
            MetaReply::Inode(inode) => Ok(inode),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn create(&self, path: &str) -> Inode {
        match self.change(create(path)).await.unwrap() {
            MetaReply::Opened { inode, .. } => inode,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn make_directory(&self, path: &str) -> Inode {
        match self.change(make_directory(path, true)).await.unwrap() {
            MetaReply::Inode(inode) => inode,
            other => panic!("{other:?}"),
        }
    }

    /// Recounts all files that are due.
    pub(crate) async fn recount(&self) {
        self.tree.recount(&mut Vec::new()).await.unwrap();
    }

    /// Runs garbage collection until nothing is left.
    pub(crate) async fn collect_all(&self) {
        while self.tree.collect().await.unwrap() > 0 {}
    }
}

/// Runs garbage collection of several services until nothing is left.
pub(crate) async fn collect_with_all(fixtures: &[impl Borrow<Fixture>]) {
    loop {
        let mut advanced = 0;
        // A service checks the removals of a round that another one has ended.
        for _ in 0..2 {
            for fixture in fixtures {
                let tree = &fixture.borrow().tree;
                tree.check_removals().await.unwrap();
                advanced += tree.collect().await.unwrap();
            }
        }
        if advanced == 0 {
            return;
        }
    }
}

pub(crate) fn config() -> TreeConfig {
    TreeConfig { gc_delay_ms: 0, dead_grace_ms: 0, recount_wait_ms: 0, ..TreeConfig::default() }
}

pub(crate) fn routing() -> watch::Receiver<Arc<RoutingInfo>> {
    let chains = (1..=4).map(ChainId).collect();
    let table = ChainTable { id: threefs_mgmtd::FIRST_TABLE, version: TableVersion(1), chains };
    let routing = RoutingInfo { tables: vec![table], ..RoutingInfo::default() };
    watch::channel(Arc::new(routing)).1
}

pub(crate) fn create(path: &str) -> MetaChange {
    let (at, layout) = (At::path(path), LayoutDefaults::default());
    MetaChange::Create {
        at,
        mode: 0o644,
        exclusive: false,
        layout,
        write: false,
        track_open: false,
    }
}

pub(crate) fn make_directory(path: &str, parents: bool) -> MetaChange {
    let (at, defaults) = (At::path(path), LayoutDefaults::default());
    MetaChange::MakeDirectory { at, mode: 0o755, parents, defaults }
}

pub(crate) fn rename(from: &str, to: &str) -> MetaChange {
    MetaChange::Rename { from: At::path(from), to: At::path(to), mode: RenameMode::Replace }
}

/// Number of inodes.
pub(crate) async fn count_inodes(store: &Store) -> usize {
    let mut txn = store.begin().await.unwrap();
    txn.range(&KeyRange::prefix(b"INOD"), usize::MAX).await.unwrap().len()
}
