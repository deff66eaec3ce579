//! Lengths: growing by reports, cutting in two steps.
//!
//! A length that is not below the one before is one step. A cut first writes the new length, a higher
//! truncate version and a `TRIM` row, with the answer to the client; then the chunks are cut; then the
//! row goes. Nobody opens the file for writing or grows it in between, or the cut, repeated after a
//! crash, would take what was written since.

use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Transaction};

use super::quota::{self, Charge};
use super::walk::{Last, find};
use super::{Given, OpError, RecountContext, load, recount, store, written_rows};
use crate::identity::{Identity, WRITE};
use crate::protocol::{
    At, InodeKind, LengthReport, MetaError, MetaReply, Reservation, SESSION_ROW_BYTES, SessionId,
};
use crate::rows::{self, InodeRow, SessionRow, TrimRow};
use crate::written::{RANGES_MAX, Written, chunks_of};

/// What a session counts for.
const SESSION_BYTES: i64 = SESSION_ROW_BYTES as i64;

/// `MetaChange::ReportLengths`.
pub(crate) struct ReportLengths<'a> {
    pub reports: &'a [LengthReport],
    pub ends: &'a [(InodeId, SessionId)],
    pub given: Given,
}

impl Operation for ReportLengths<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut inodes = Vec::with_capacity(self.reports.len());
        for report in self.reports {
            match grow(txn, report, &self.given).await {
                Ok(row) => inodes.push(Ok(row.inode)),
                // With a part of it written already.
                Err(OpError::Refused(error @ MetaError::NoSpace { .. })) => {
                    return Err(error.into());
                }
                Err(OpError::Refused(error)) => inodes.push(Err(error)),
                Err(error) => return Err(error),
            }
        }
        for (inode, session) in self.ends {
            end_session(txn, *inode, *session, &self.given.recount_context()).await?;
        }
        Ok(MetaReply::Inodes(inodes))
    }
}

/// `MetaChange::Reserve`.
pub(crate) struct Reserve<'a> {
    pub reservations: &'a [Reservation],
    pub client: ClientId,
    /// Why no session may begin, if so.
    pub full: Option<MetaError>,
}

impl Operation for Reserve<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut inodes = Vec::with_capacity(self.reservations.len());
        for reservation in self.reservations {
            match reserve(txn, reservation, self.client, self.full.as_ref()).await {
                Ok(row) => inodes.push(Ok(row.inode)),
                Err(OpError::Refused(error)) => inodes.push(Err(error)),
                Err(error) => return Err(error),
            }
        }
        Ok(MetaReply::Inodes(inodes))
    }
}

async fn reserve(
    txn: &mut Transaction,
    wanted: &Reservation,
    client: ClientId,
    full: Option<&MetaError>,
) -> Result<InodeRow, OpError> {
    let mut row = load(txn, wanted.inode, "").await?;
    let InodeKind::File { truncate_version, layout, .. } = &row.inode.kind else {
        return Err(not_a_file(&row));
    };
    check_length(wanted.end, layout)?;
    if wanted.truncate_version != *truncate_version {
        return Ok(row);
    }
    if txn.get(&rows::trim(wanted.inode)).await?.is_some() {
        return Err(OpError::TrimPending(wanted.inode));
    }
    // First: a refusal leaves nothing of it in the transaction.
    begin_session(txn, &mut row, wanted.session, client, full).await?;
    if let InodeKind::File { reserved, .. } = &mut row.inode.kind {
        *reserved = wanted.end.max(*reserved);
    }
    row.end_max = row.end_max.max(wanted.end);
    recharge(txn, &mut row).await?;
    store(txn, &mut row)?;
    Ok(row)
}

/// A write session, unless it is there already. Its row counts for the file's quota, as names do:
/// nothing else bounds how many sessions a client begins. Refused where the store is `full`. The
/// caller stores the inode.
pub(super) async fn begin_session(
    txn: &mut Transaction,
    row: &mut InodeRow,
    session: SessionId,
    client: ClientId,
    full: Option<&MetaError>,
) -> Result<(), OpError> {
    let key = rows::session(row.inode.id, session);
    if txn.get(&key).await?.is_some() {
        return Ok(());
    }
    if let Some(full) = full {
        return Err(full.clone().into());
    }
    quota::charge_metadata(txn, row, SESSION_BYTES).await?;
    Ok(rows::write(txn, &key, &SessionRow { client, counted: true })?)
}

/// Charges what a file needs more than before. A file that lost its last name while nobody had it
/// open counts again. In a quota it never counts for less at once: see `recount`.
async fn recharge(txn: &mut Transaction, row: &mut InodeRow) -> Result<(), OpError> {
    let before = if row.charged { Charge::of(row) } else { Charge::default() };
    let needed = row.needed_end();
    row.charged_end = match row.inode.quota {
        Some(_) => row.charged_end.max(needed),
        None => needed,
    };
    // What counted for nothing meanwhile has no room among the excess any more.
    row.excess = if row.charged { row.excess.min(row.charged_end - needed) } else { 0 };
    row.charged = true;
    quota::charge(txn, row.inode.quota, Charge::of(row).since(before)).await
}

/// A session ends; the last one of a file takes what was reserved with it.
pub(super) async fn end_session(
    txn: &mut Transaction,
    inode: InodeId,
    session: SessionId,
    context: &RecountContext,
) -> Result<(), OpError> {
    let key = rows::session(inode, session);
    let stored = txn.get(&key).await?;
    let ended = stored.map(|value| SessionRow::decode(&key, &value)).transpose()?;
    txn.clear(&key);
    let is_last = txn.range(&KeyRange::prefix(&rows::sessions(inode)), 1).await?.is_empty();
    let Some(mut row) = rows::read_inode(txn, inode).await? else {
        return Ok(());
    };
    let counted = ended.is_some_and(|ended| ended.counted);
    if counted {
        quota::charge_metadata(txn, &mut row, -SESSION_BYTES).await?;
    }
    let InodeKind::File { reserved, .. } = &mut row.inode.kind else { return Ok(()) };
    let gives_back = is_last && *reserved != 0;
    if gives_back {
        *reserved = 0;
        if row.charged {
            recharge(txn, &mut row).await?;
        }
        recount::queue_recount(txn, &mut row, context).await?;
    }
    if counted || gives_back {
        store(txn, &mut row)?;
    }
    Ok(())
}

/// Applies one report if it is of the current truncate version and the file is shorter.
pub(super) async fn grow(
    txn: &mut Transaction,
    report: &LengthReport,
    given: &Given,
) -> Result<InodeRow, OpError> {
    let mut row = load(txn, report.inode, "").await?;
    let InodeKind::File { length, truncate_version, content, written, layout, .. } =
        &mut row.inode.kind
    else {
        return Err(not_a_file(&row));
    };
    check_length(report.length, layout)?;
    if report.truncate_version != *truncate_version {
        return Ok(row);
    }
    if txn.get(&rows::trim(report.inode)).await?.is_some() {
        return Err(OpError::TrimPending(report.inode));
    }
    *length = report.length.max(*length);
    *content += 1;
    // In order, whatever was sent, and no more than the report says was written in all.
    let mut reported = Written::default();
    reported.merge(&report.written);
    reported.cut(report.length, layout.chunk_bytes);
    written.merge(&reported);
    let moved = written.shorten(RANGES_MAX);
    if !moved.is_empty() {
        written.set_more(true);
        written_rows::add(txn, report.inode, &moved, given.full.as_ref()).await?;
    }
    row.end_max = row.end_max.max(report.length);
    // Also when it did not grow: something was written.
    row.inode.modified = given.now;
    row.inode.changed = given.now;
    recharge(txn, &mut row).await?;
    store(txn, &mut row)?;
    Ok(row)
}

/// The first step of `MetaChange::SetLength`, and its answer. A `TRIM` row says that another follows.
pub(crate) struct BeginTrim<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub length: u64,
    pub given: Given,
}

impl Operation for BeginTrim<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.who, self.at, Last::Follow).await?;
        let id = row.inode.id;
        if !row.inode.is_directory() {
            self.who.check(&row.inode, WRITE, &self.at.path)?;
        }
        let InodeKind::File { length, reserved, truncate_version, layout, content, written } =
            &mut row.inode.kind
        else {
            return Err(match row.inode.is_directory() {
                true => MetaError::IsADirectory { path: self.at.path.clone() }.into(),
                false => not_a_file(&row),
            });
        };
        check_length(self.length, layout)?;
        if txn.get(&rows::trim(id)).await?.is_some() {
            return Err(OpError::TrimPending(id));
        }
        let cuts = self.length < *length || self.length < *reserved || self.length == 0;
        if cuts {
            *truncate_version += 1;
            // Writers learn it with the version, and reserve again.
            *reserved = 0;
            let trim = TrimRow { length: self.length, truncate_version: *truncate_version };
            rows::write(txn, &rows::trim(id), &trim)?;
        }
        *length = self.length;
        *content += 1;
        written.cut(self.length, layout.chunk_bytes);
        if written.has_more() {
            written_rows::cut(txn, id, chunks_of(self.length, layout.chunk_bytes)).await?;
            written.set_more(self.length > 0);
        }
        row.end_max = row.end_max.max(self.length);
        row.inode.modified = self.given.now;
        row.inode.changed = self.given.now;
        if row.charged || self.length > 0 {
            recharge(txn, &mut row).await?;
        }
        if cuts {
            recount::queue_recount(txn, &mut row, &self.given.recount_context()).await?;
        }
        store(txn, &mut row)?;
        Ok(MetaReply::Inode(row.inode))
    }
}

/// What a truncation still has to cut, of which chunks, none at or beyond which byte.
pub(crate) struct ReadTrim(pub InodeId);

impl Operation for ReadTrim {
    type Output = Option<(TrimRow, Layout, u64)>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let Some(trim) = rows::read(txn, &rows::trim(self.0)).await? else { return Ok(None) };
        let row = load(txn, self.0, "").await?;
        match row.inode.kind {
            InodeKind::File { layout, .. } => Ok(Some((trim, layout, row.end_max))),
            _ => Ok(None),
        }
    }
}

/// The chunks are cut.
pub(crate) struct FinishTrim {
    pub inode: InodeId,
    /// The cut that was made. The row of a later one stays.
    pub truncate_version: u64,
}

impl Operation for FinishTrim {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let key = rows::trim(self.inode);
        let pending = rows::read::<TrimRow>(txn, &key).await?;
        if pending.is_some_and(|trim| trim.truncate_version == self.truncate_version) {
            txn.clear(&key);
        }
        Ok(())
    }
}

/// Refuses a length that no chunk index reaches, whoever names it: kernels fail every lookup of a file
/// beyond 2^63, and a quota without a limit of its own would take the rest of those above.
fn check_length(length: u64, layout: &Layout) -> Result<(), MetaError> {
    let chunk_bytes = layout.chunk_bytes;
    let length_max = layout.length_max();
    if length <= length_max {
        return Ok(());
    }
    let detail = format!(
        "{length} bytes are more than a file with chunks of {chunk_bytes} bytes can have \
         ({length_max})"
    );
    Err(MetaError::FileTooLarge { detail })
}

fn not_a_file(row: &InodeRow) -> OpError {
    MetaError::Invalid {
        field: "inode".into(),
        value: row.inode.id.to_string(),
        reason: "it is not a file".into(),
    }
    .into()
}
