//! What the metadata service needs of storage: that bytes beyond a length go away, and where they end.

use std::ops::Range;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;

/// Takes chunks away and finds them. The service's binary injects one that is made of the storage client.
pub trait ChunkTrimmer: Send + Sync + 'static {
    /// Afterwards no chunk of the file holds a byte at or beyond the start of the range; with 0 all
    /// its chunks are gone. There never was one at or beyond its end. Chunks may exist beyond any
    /// length that was ever reported, so the chains that can have some of the range are asked what
    /// they hold of the inode. Idempotent: it is repeated after failures.
    ///
    /// The error's text says what failed where; the caller logs it and tries again later.
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>>;

    /// Has storage forget dead files: all their chunks go, and storage refuses to write them from
    /// then on. Idempotent. One result for each file, in order: a chain that does not answer fails
    /// its own files and delays the others no longer than it takes to notice.
    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>>;

    /// The end of what the chunks of a file hold within a range of its bytes; its start if they hold
    /// nothing there.
    ///
    /// The error's text says what failed where; the caller logs it and tries again later.
    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>>;
}

/// A removed file that nobody can read any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadFile {
    /// Which.
    pub inode: InodeId,
    /// Where its chunks are.
    pub layout: Layout,
    /// No chunk was ever written at or beyond so many bytes, so chains that lie beyond have none.
    pub end: u64,
}

/// For tests and trees without data: there is nothing to take away.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoChunks;

impl ChunkTrimmer for NoChunks {
    fn trim<'a>(
        &'a self,
        _inode: InodeId,
        _layout: &'a Layout,
        _range: Range<u64>,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        _deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        Box::pin(std::future::ready(vec![Ok(()); files.len()]))
    }

    fn stored_end<'a>(
        &'a self,
        _inode: InodeId,
        _layout: &'a Layout,
        range: Range<u64>,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        Box::pin(std::future::ready(Ok(range.start)))
    }
}
