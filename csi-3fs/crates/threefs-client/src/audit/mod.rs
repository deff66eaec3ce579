//! Audit of storage against the tree, as shown by `threefs fsck`: chunks whose inode does not exist, and
//! chunks that must exist and do not.
//!
//! It walks along the inodes, page by page, and along the chunks of all chains at the same time, so its
//! memory does not depend on their number. Files change meanwhile, so what differs is a suspicion:
//!
//! - A chunk of an unknown inode is leaked if the inode does not exist *after* the chunk was listed. A
//!   file exists before its first chunk, and inode numbers are never used again, so such an inode
//!   will not exist later: no concurrent operation can have created the chunk for a file that stays.
//! - A chunk is missing if it must exist both before and after its chain was asked for it, without a
//!   truncation in between (as in `absent`). A hole is not: it is not among the written chunks.
//!
//! A chunk has a version for each epoch in which it was written. Of a file of the tree the newest must
//! exist, of a file of a snapshot the newest up to the epoch of the snapshot. Files that only
//! snapshots show have an inode, so their chunks are not leaked.

mod chain;
mod compare;
#[cfg(test)]
mod confirm_test;
mod expected;
mod missing;
mod paths;
mod report;
mod snapshots;
#[cfg(test)]
mod snapshots_test;

use std::collections::BTreeMap;
use std::sync::Arc;

use threefs_core::ids::{ChainId, ChunkId, Epoch, InodeId};
use threefs_core::routing::RoutingInfo;
use threefs_meta::protocol::BATCH_MAX;
use threefs_meta::{AuditAnswer, AuditQuery, AuditedFile, MetaQuery, MetaReply, ShownFile};
use tokio::task::JoinSet;

use self::chain::ChainCursor;
use self::compare::{NotCompared, TreeOfCluster};
use self::expected::{Chunks, LocatedFile, merged};
pub use self::report::{AuditReport, Leak, MissingChunks, Removed};
use crate::Client;
use crate::error::{Attempts, ClientError, OperationName};

/// Chains that are read at once.
const CHAINS_AT_ONCE: usize = 16;
/// Missing chunks of one chain and page that are confirmed; further ones are counted.
const SUSPECTS_MAX: usize = 1024;
/// Leaked inodes of one chain and page that are kept; further ones are counted.
const LEAKS_OF_CHAIN_MAX: usize = 65_536;

/// An audit in progress. Everything of an inode is compared in one step.
pub struct Audit {
    client: Client,
    tree: TreeOfCluster,
    cursors: Vec<ChainCursor>,
    after: InodeId,
    ended: bool,
    /// Directory and name up to which names were searched.
    named: Option<(InodeId, String)>,
    report: AuditReport,
}

/// One page of inodes.
struct Page {
    /// Sorted.
    inodes: Vec<InodeId>,
    /// Files of the tree and of snapshots, sorted by inode and epoch.
    files: Vec<LocatedFile>,
    /// Chunks of inodes up to this one belong to the page.
    until: InodeId,
}

impl Page {
    /// The chunks of its files that must exist on a chain.
    fn expected_on(&self, chain: ChainId) -> Chunks<'_> {
        let of_inode = self.files.chunk_by(|one, next| one.stored == next.stored);
        Box::new(of_inode.flat_map(move |files| {
            merged(files.iter().map(move |it| it.chunks_on(&it.file.written, chain)))
        }))
    }

    /// The file with an inode and an epoch.
    fn file(&self, stored: InodeId, up_to: Epoch) -> Option<&LocatedFile> {
        let key = |file: &LocatedFile| (file.stored, file.up_to);
        let place = self.files.binary_search_by_key(&(stored, up_to), key).ok()?;
        self.files.get(place)
    }
}

/// What a chain has for one page.
#[derive(Default)]
struct Compared {
    chunks: u64,
    bytes: u64,
    /// Leaked inodes with their chunks and bytes, and the sum of further ones.
    leaked: Vec<(InodeId, u64, u64)>,
    leaked_more: Removed,
    /// Suspicions.
    missing: Vec<ChunkId>,
    missing_more: u64,
}

impl Client {
    /// Starts an audit.
    ///
    /// # Errors
    /// No routing within the timeout.
    pub async fn audit(&self) -> Result<Audit, ClientError> {
        let mut attempts = Attempts::of("audit");
        let deadline = self.deadline();
        let Some(routing) = self.0.routing.current(&mut attempts, deadline).await? else {
            return Err(attempts.unavailable(self.0.config.timeout));
        };
        let RoutingInfo { cluster, chains, .. } = &*routing;
        Ok(Audit {
            client: self.clone(),
            tree: TreeOfCluster { client: self.clone(), cluster: *cluster },
            cursors: chains.keys().copied().map(ChainCursor::new).collect(),
            after: InodeId(0),
            ended: false,
            named: None,
            report: AuditReport::default(),
        })
    }
}

impl Audit {
    /// What was found so far.
    pub fn report(&self) -> &AuditReport {
        &self.report
    }

    /// Compares the next inodes; false after the last ones.
    ///
    /// # Errors
    /// The metadata service does not answer, or is of another cluster. A chain that does not answer is
    /// reported, and not asked again.
    pub async fn step(&mut self) -> Result<bool, ClientError> {
        if self.ended {
            return Ok(false);
        }
        let page = Arc::new(self.next_page().await?);
        let missing = self.compare_chains(&page).await?;
        self.confirm_missing(&page, missing).await?;
        for file in page.files.iter().filter(|it| it.file.written.has_more()) {
            self.compare_further(file).await?;
        }
        Ok(!self.ended)
    }

    /// Compares all chains with a page, some at a time. Returns the chunks that may be missing.
    async fn compare_chains(
        &mut self,
        page: &Arc<Page>,
    ) -> Result<Vec<(ChainId, ChunkId)>, ClientError> {
        let (mut tasks, mut missing) = (JoinSet::new(), Vec::new());
        let mut waiting = std::mem::take(&mut self.cursors);
        loop {
            while tasks.len() < CHAINS_AT_ONCE
                && let Some(mut cursor) = waiting.pop()
            {
                let (tree, page) = (self.tree.clone(), Arc::clone(page));
                tasks.spawn(async move {
                    let compared = tree.compare(&mut cursor, &page).await;
                    (cursor, compared)
                });
            }
            let (cursor, compared) = match tasks.join_next().await {
                Some(Ok(finished)) => finished,
                Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
                None => return Ok(missing),
            };
            match compared {
                Ok(compared) => {
                    self.report.add(cursor.chain, &compared);
                    missing.extend(compared.missing.into_iter().map(|it| (cursor.chain, it)));
                    self.cursors.push(cursor);
                }
                Err(NotCompared::Chain(error)) => self.report.not_read(cursor.chain, &error),
                Err(NotCompared::Tree(error)) => return Err(error),
            }
        }
    }

    async fn next_page(&mut self) -> Result<Page, ClientError> {
        let after = self.after;
        let query = AuditQuery::Files { after, limit: BATCH_MAX as u32 };
        let AuditAnswer::Files { mut inodes, mut files, more } =
            self.client.ask_audit(query).await?
        else {
            return Err(unexpected());
        };
        let end = inodes.last().copied().filter(|_| more);
        let (shown, until) = match inodes.last() {
            Some(last) => self.client.shown_of(after, *last).await?,
            None => (Vec::new(), after),
        };
        // Fewer inodes, if snapshots show many states of them.
        let last = if inodes.last() == Some(&until) { end } else { Some(until) };
        inodes.retain(|inode| *inode <= until);
        files.retain(|file| file.inode <= until);
        (self.after, self.ended) = (last.unwrap_or(after), last.is_none());
        self.report.inodes += inodes.len() as u64;
        let mut located = Vec::with_capacity(files.len() + shown.len());
        for file in files {
            let (chains, stored) = (self.chains_of(&file).await?, file.inode);
            located.push(LocatedFile { file, chains, stored, up_to: Epoch::MAX, snapshot: None });
        }
        for ShownFile { file, stored, epoch, snapshot } in shown {
            let (chains, snapshot) = (self.chains_of(&file).await?, Some(snapshot));
            located.push(LocatedFile { file, chains, stored, up_to: epoch, snapshot });
        }
        located.sort_by_key(|file| (file.stored, file.up_to));
        Ok(Page { inodes, files: located, until: last.unwrap_or(InodeId(u64::MAX)) })
    }

    async fn chains_of(&self, file: &AuditedFile) -> Result<Vec<ChainId>, ClientError> {
        let what: OperationName = Arc::from(format!("audit {}", file.inode));
        self.client.chains(&what, &file.layout, self.client.deadline()).await
    }

    /// Removes chunks of leaked inodes that still do not exist, at most one batch; false after the last
    /// one. Storage refuses updates of the inodes from then on.
    ///
    /// # Errors
    /// Any [`ClientError`]: the inodes stay, and the call can be repeated.
    pub async fn remove_leaked(&mut self) -> Result<bool, ClientError> {
        let inodes: Vec<InodeId> = self.report.leaks.keys().take(BATCH_MAX).copied().collect();
        if inodes.is_empty() {
            return Ok(false);
        }
        let absent = self.tree.unknown_of(&inodes).await?;
        let mut of_chain: BTreeMap<ChainId, Vec<InodeId>> = BTreeMap::new();
        for inode in &absent {
            for chain in self.report.leaks.get(inode).into_iter().flat_map(|it| &it.chains) {
                of_chain.entry(*chain).or_default().push(*inode);
            }
        }
        let what: OperationName = Arc::from("remove leaked chunks");
        for (chain, inodes) in of_chain {
            let inodes = inodes.into_iter().collect();
            self.client.forget_on(&what, chain, inodes, self.client.deadline()).await?;
        }
        for inode in inodes {
            let leak = self.report.leaks.remove(&inode);
            if let Some(leak) = leak.filter(|_| absent.contains(&inode)) {
                self.report.removed.add(leak.chunks, leak.bytes);
            }
        }
        Ok(true)
    }
}

impl Client {
    async fn ask_audit(&self, query: AuditQuery) -> Result<AuditAnswer, ClientError> {
        match self.0.metadata.query("audit", MetaQuery::Audit(query), self.deadline()).await? {
            MetaReply::Audit(answer) => Ok(answer),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }
}

fn unexpected() -> ClientError {
    ClientError::Protocol { who: "meta".into(), detail: "an answer to another query".into() }
}
