//! Interface to storage: removal of bytes beyond a length, and the end of the stored bytes.

use std::ops::Range;
use std::sync::Arc;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;

/// Checks that a truncation is still pending; the error says that it is not, or could not be checked.
pub type Pending = Arc<dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// Removes chunks and finds their end. The binary injects one built on the storage client.
pub trait ChunkTrimmer: Send + Sync + 'static {
    /// Removes all bytes of the file at or beyond the start of the range; with 0, all its chunks.
    /// The file has no bytes at or beyond the end of the range. Chunks may exist beyond any
    /// reported length, so every chain that can hold part of the range is queried. Idempotent: it
    /// is repeated after failures.
    ///
    /// Another service may complete the truncation at any time, after which clients write again. So
    /// bytes are removed only from versions of chunks that existed when `pending` succeeded.
    ///
    /// The error says what failed where; the caller logs it and retries later.
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        pending: Pending,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>>;

    /// Drops all chunks of dead files; storage refuses to write them afterwards. Idempotent. One
    /// result per file, in order: a chain that does not respond fails only its own files and delays
    /// the others no longer than it takes to detect that.
    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>>;

    /// The end of the stored bytes of a file within a range; the start of the range if there are
    /// none.
    ///
    /// The error says what failed where; the caller logs it and retries later.
    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>>;
}

/// A removed file that can no longer be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadFile {
    /// The file.
    pub inode: InodeId,
    /// Where its chunks are.
    pub layout: Layout,
    /// No chunk was ever written at or beyond this byte, so chains that lie beyond have none.
    pub end: u64,
}

/// A trimmer without storage, for tests and trees without data.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoChunks;

impl ChunkTrimmer for NoChunks {
    fn trim<'a>(
        &'a self,
        _inode: InodeId,
        _layout: &'a Layout,
        _range: Range<u64>,
        _pending: Pending,
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
