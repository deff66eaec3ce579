//! Names of rows in etcd: `PREFIX:r` and the key for rows of callers, `PREFIX:i/NAME` for rows of the
//! backend. A prefix contains no colon, so the rows of two stores are disjoint. Pure.

use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, TxnOp};

use crate::guard::{Guard, Observed};
use crate::layer::Write;
/// Names of the rows of one store.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    prefix: String,
}

impl Rows {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: format!("{}:", prefix.trim_end_matches('/')) }
    }

    /// The row of a caller's key.
    pub(crate) fn row(&self, key: &[u8]) -> Vec<u8> {
        [self.prefix.as_bytes(), b"r", key].concat()
    }

    /// The caller's key of a row.
    pub(crate) fn key<'a>(&self, row: &'a [u8]) -> &'a [u8] {
        row.get(self.prefix.len() + 1..).unwrap_or_default()
    }

    /// Names of the first row of the callers, and after the last one.
    pub(crate) fn all(&self) -> (Vec<u8>, Vec<u8>) {
        let name = |end: &str| format!("{}{end}", self.prefix).into_bytes();
        (name("r"), name("s"))
    }

    /// As [`Rows::all`], with the rows of the backend.
    pub(crate) fn all_of_store(&self) -> (Vec<u8>, Vec<u8>) {
        let end = [self.prefix.trim_end_matches(':'), ";"].concat();
        (self.prefix.clone().into_bytes(), end.into_bytes())
    }

    /// A row of the backend.
    pub(crate) fn internal(&self, name: &str) -> Vec<u8> {
        format!("{}i/{name}", self.prefix).into_bytes()
    }

    /// Bytes added to a key.
    pub(crate) fn overhead(&self) -> usize {
        self.prefix.len() + 1
    }

    /// The comparison of a guard.
    pub(crate) fn compare(&self, guard: &Guard) -> Compare {
        match guard {
            Guard::Row { key, revision } => {
                Compare::mod_revision(self.row(key), CompareOp::Equal, signed(*revision))
            }
            Guard::Range { range, revision } => {
                let (start, after) = (self.row(&range.start), signed(revision.saturating_add(1)));
                Compare::mod_revision(start, CompareOp::Less, after)
                    .with_range(self.row(&range.end))
            }
        }
    }

    /// The read that returns a guard's state. Values only of counters, which are few.
    pub(crate) fn observe(&self, guard: &Guard, with_value: bool) -> TxnOp {
        match guard {
            Guard::Row { key, .. } if with_value => TxnOp::get(self.row(key), None),
            Guard::Row { key, .. } => {
                TxnOp::get(self.row(key), Some(GetOptions::new().with_keys_only()))
            }
            Guard::Range { range, revision } => {
                let newer = GetOptions::new()
                    .with_range(self.row(&range.end))
                    .with_min_mod_revision(signed(revision.saturating_add(1)))
                    .with_keys_only()
                    .with_limit(1);
                TxnOp::get(self.row(&range.start), Some(newer))
            }
        }
    }

    /// The operation of a write.
    pub(crate) fn operation(&self, write: &Write) -> TxnOp {
        match write {
            Write::Put { key, value } => TxnOp::put(self.row(key), value.clone(), None),
            Write::Delete { key } => TxnOp::delete(self.row(key), None),
            Write::DeleteRange { range } => {
                let end = DeleteOptions::new().with_range(self.row(&range.end));
                TxnOp::delete(self.row(&range.start), Some(end))
            }
        }
    }
}

/// The state of a guard, from the reply to its read.
pub(crate) fn observed(guard: &Guard, reply: &etcd_client::GetResponse) -> Observed {
    let first = reply.kvs().first();
    match guard {
        Guard::Row { .. } => Observed::Row {
            revision: first.map_or(0, |row| unsigned(row.mod_revision())),
            value: first.map(|row| row.value().to_vec()).unwrap_or_default(),
        },
        Guard::Range { .. } => Observed::Range { written: first.is_some() },
    }
}

/// etcd's revisions are positive `i64`.
pub(crate) fn signed(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

/// See [`signed`].
pub(crate) fn unsigned(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or(0)
}
