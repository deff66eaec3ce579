//! Typed calls of the metadata service, for tests and benchmarks.
// Each of them uses only some; a reply of another kind fails the test.
#![allow(dead_code, clippy::panic)]

use fabric::deadline::Deadline;
use threefs_meta::protocol::LIST_LIMIT_MAX;
use threefs_meta::{
    At, Entry, Inode, LayoutDefaults, MetaChange, MetaClient, MetaClientError, MetaQuery,
    MetaReply, RenameMode, SessionId,
};

type Result<T> = std::result::Result<T, MetaClientError>;

pub(crate) trait Calls {
    /// The inode at a path, following symbolic links.
    async fn stat(&self, at: At, deadline: Deadline) -> Result<Inode>;
    /// All entries of a directory.
    async fn list(&self, at: At, deadline: Deadline) -> Result<Vec<Entry>>;
    async fn make_directory(&self, at: At, parents: bool, deadline: Deadline) -> Result<Inode>;
    /// Creates a file with default permissions and the directory's layout, open for writing.
    async fn create(
        &self,
        at: At,
        exclusive: bool,
        deadline: Deadline,
    ) -> Result<(Inode, Option<SessionId>)>;
    async fn set_length(&self, at: At, length: u64, deadline: Deadline) -> Result<Inode>;
    async fn rename(&self, from: At, to: At, deadline: Deadline) -> Result<Inode>;
}

impl Calls for MetaClient {
    async fn stat(&self, at: At, deadline: Deadline) -> Result<Inode> {
        Ok(inode(self.query(MetaQuery::Stat { at, follow: true }, deadline).await?))
    }

    async fn list(&self, at: At, deadline: Deadline) -> Result<Vec<Entry>> {
        let mut all: Vec<Entry> = Vec::new();
        loop {
            let after = all.last().map(|entry| entry.name.clone()).unwrap_or_default();
            let query = MetaQuery::List { at: at.clone(), after, limit: LIST_LIMIT_MAX };
            match self.query(query, deadline).await? {
                MetaReply::Page { entries, more } => {
                    all.extend(entries);
                    if !more {
                        return Ok(all);
                    }
                }
                other => panic!("expected a page, got {other:?}"),
            }
        }
    }

    async fn make_directory(&self, at: At, parents: bool, deadline: Deadline) -> Result<Inode> {
        let (mode, defaults) = (0o755, LayoutDefaults::default());
        let change = MetaChange::MakeDirectory { at, mode, parents, defaults };
        Ok(inode(self.change(change, deadline).await?))
    }

    async fn create(
        &self,
        at: At,
        exclusive: bool,
        deadline: Deadline,
    ) -> Result<(Inode, Option<SessionId>)> {
        let (mode, layout) = (0o644, LayoutDefaults::default());
        let (write, track_open) = (true, false);
        let change = MetaChange::Create { at, mode, exclusive, layout, write, track_open };
        match self.change(change, deadline).await? {
            MetaReply::Opened { inode, session, .. } => Ok((inode, session)),
            other => panic!("expected an open file, got {other:?}"),
        }
    }

    async fn set_length(&self, at: At, length: u64, deadline: Deadline) -> Result<Inode> {
        Ok(inode(self.change(MetaChange::SetLength { at, length }, deadline).await?))
    }

    async fn rename(&self, from: At, to: At, deadline: Deadline) -> Result<Inode> {
        let change = MetaChange::Rename { from, to, mode: RenameMode::Replace };
        Ok(inode(self.change(change, deadline).await?))
    }
}

fn inode(reply: MetaReply) -> Inode {
    match reply {
        MetaReply::Inode(inode) => inode,
        other => panic!("expected an inode, got {other:?}"),
    }
}
