//! Keys of the rows.

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::KvError;

use crate::locks::Owner;
use crate::protocol::{LockKind, SessionId};
use crate::rows::{ANSWERS, FLOORS, LOCK_SESSIONS, LOCKED, RECALLS};

fn numbered(prefix: &[u8; 4], inode: InodeId, rest: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(12 + rest.len());
    key.extend_from_slice(prefix);
    key.extend_from_slice(&inode.0.to_be_bytes());
    key.extend_from_slice(rest);
    key
}

pub(crate) fn inode(id: InodeId) -> Vec<u8> {
    numbered(b"INOD", id, &[])
}

pub(crate) fn dentry(parent: InodeId, name: impl AsRef<[u8]>) -> Vec<u8> {
    numbered(b"DENT", parent, name.as_ref())
}

/// Prefix of all names of a directory.
pub(crate) fn dentries(parent: InodeId) -> Vec<u8> {
    numbered(b"DENT", parent, &[])
}

pub(crate) fn directory_time(id: InodeId) -> Vec<u8> {
    numbered(b"DTIM", id, &[])
}

pub(crate) fn subdirectories(id: InodeId) -> Vec<u8> {
    numbered(b"DSUB", id, &[])
}

pub(crate) fn session(id: InodeId, session: SessionId) -> Vec<u8> {
    numbered(b"INOS", id, &session.0.to_be_bytes())
}

/// Prefix of all sessions of a file.
pub(crate) fn sessions(id: InodeId) -> Vec<u8> {
    numbered(b"INOS", id, &[])
}

pub(crate) fn quota(id: InodeId) -> Vec<u8> {
    numbered(b"QUOT", id, &[])
}

pub(crate) fn quota_bytes(id: InodeId) -> Vec<u8> {
    numbered(b"QBYT", id, &[])
}

pub(crate) fn quota_excess(id: InodeId) -> Vec<u8> {
    numbered(b"QEXC", id, &[])
}

pub(crate) fn quota_inodes(id: InodeId) -> Vec<u8> {
    numbered(b"QINO", id, &[])
}

pub(crate) fn quota_metadata(id: InodeId) -> Vec<u8> {
    numbered(b"QMET", id, &[])
}

pub(crate) fn attribute(id: InodeId, name: &str) -> Vec<u8> {
    numbered(b"XATT", id, name.as_bytes())
}

/// Prefix of all extended attributes of an inode.
pub(crate) fn attributes(id: InodeId) -> Vec<u8> {
    numbered(b"XATT", id, &[])
}

/// A page of written chunks; see `ops::file::written_rows`.
pub(crate) fn written(id: InodeId, level: u8, page: u64) -> Vec<u8> {
    // At most 2^24, one past the last page.
    let [a, b, c, d] = (page as u32).to_be_bytes();
    numbered(b"WRIT", id, &[level, a, b, c, d])
}

/// Prefix of all pages of written chunks of a file.
pub(crate) fn written_of(id: InodeId) -> Vec<u8> {
    numbered(b"WRIT", id, &[])
}

pub(crate) fn trim(id: InodeId) -> Vec<u8> {
    numbered(b"TRIM", id, &[])
}

pub(crate) fn answer(client: ClientId, sequence: u64) -> Vec<u8> {
    [ANSWERS, &client.0.to_be_bytes(), &sequence.to_be_bytes()].concat()
}

pub(crate) fn recount(id: InodeId) -> Vec<u8> {
    numbered(b"RCNT", id, &[])
}

/// Size of the answers kept for a volume.
pub(crate) fn answer_bytes(volume: InodeId) -> Vec<u8> {
    numbered(b"ABYT", volume, &[])
}

pub(crate) fn floor(client: ClientId) -> Vec<u8> {
    [FLOORS, &client.0.to_be_bytes()].concat()
}

/// The locks of a file. Its append lease has a separate row, which services of earlier releases
/// would fail to decode.
pub(crate) fn locks(id: InodeId, kind: LockKind) -> Vec<u8> {
    match kind {
        LockKind::Posix | LockKind::Flock => numbered(b"LOCK", id, &[]),
        LockKind::Append => numbered(b"LAPP", id, &[]),
    }
}

/// Prefix of the append leases of a client that others wait for.
pub(crate) fn recalls(client: ClientId) -> Vec<u8> {
    [RECALLS, &client.0.to_be_bytes()].concat()
}

/// An append lease of a client that others wait for.
pub(crate) fn recall(client: ClientId, id: InodeId) -> Vec<u8> {
    [RECALLS, &client.0.to_be_bytes(), &id.0.to_be_bytes()].concat()
}

/// The file from the key of a recall.
pub(crate) fn recalled_of_key(key: &[u8]) -> Result<InodeId, KvError> {
    let bytes = key.get(20..28).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| KvError::bad_row(key, "not the key of a recall"))?;
    Ok(InodeId(u64::from_be_bytes(bytes)))
}

/// The lock session of a client.
pub(crate) fn lock_session(client: ClientId) -> Vec<u8> {
    [LOCK_SESSIONS, &client.0.to_be_bytes()].concat()
}

/// Prefix of the files in which a client holds or waits for locks.
pub(crate) fn locked_by_client(client: ClientId) -> Vec<u8> {
    [LOCKED, &client.0.to_be_bytes()].concat()
}

/// Prefix of the files in which an owner holds or waits for locks.
pub(crate) fn locked_by(owner: Owner) -> Vec<u8> {
    let kind = match owner.kind {
        LockKind::Posix => 0,
        LockKind::Flock => 1,
        LockKind::Append => 2,
    };
    let mut key = locked_by_client(owner.client);
    key.push(kind);
    key.extend_from_slice(&owner.number.to_be_bytes());
    key
}

/// A file in which an owner holds or waits for locks.
pub(crate) fn locked(owner: Owner, id: InodeId) -> Vec<u8> {
    let mut key = locked_by(owner);
    key.extend_from_slice(&id.0.to_be_bytes());
    key
}

/// Owner and file from the key of a locked file.
pub(crate) fn locked_of_key(key: &[u8]) -> Result<(Owner, InodeId), KvError> {
    let client = client_of_key(key)?;
    let number = |at: usize| {
        let bytes = key.get(at..at + 8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
        bytes.map(u64::from_be_bytes)
    };
    let kind = match key.get(20) {
        Some(0) => Some(LockKind::Posix),
        Some(1) => Some(LockKind::Flock),
        Some(2) => Some(LockKind::Append),
        _ => None,
    };
    match (kind, number(21), number(29)) {
        (Some(kind), Some(number), Some(inode)) => {
            Ok((Owner { client, kind, number }, InodeId(inode)))
        }
        _ => Err(KvError::bad_row(key, "not the key of a locked file")),
    }
}

/// Number of lock sessions, and of files in which their owners hold locks, of a volume.
pub(crate) fn lock_count(volume: InodeId) -> Vec<u8> {
    numbered(b"LCNT", volume, &[])
}

/// The client from a key of the form prefix, client, rest.
pub(crate) fn client_of_key(key: &[u8]) -> Result<ClientId, KvError> {
    let bytes = key.get(4..20).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| KvError::bad_row(key, "the key has no client"))?;
    Ok(ClientId(u128::from_be_bytes(bytes)))
}

/// Client and sequence from the key of an answer.
pub(crate) fn answer_of_key(key: &[u8]) -> Result<(ClientId, u64), KvError> {
    let sequence = key.get(20..28).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    let sequence = sequence.ok_or_else(|| KvError::bad_row(key, "not the key of an answer"))?;
    Ok((client_of_key(key)?, u64::from_be_bytes(sequence)))
}

/// The inode from a key of the form prefix, inode, rest.
pub(crate) fn inode_of_key(key: &[u8]) -> Result<InodeId, KvError> {
    let bytes = key.get(4..12).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| KvError::bad_row(key, "the key has no inode"))?;
    Ok(InodeId(u64::from_be_bytes(bytes)))
}
