//! Length reports, reservations and the charges of files. Truncation is in `trim`.

use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::ops::file::written_rows;
use crate::ops::history::Owner;
use crate::ops::quota::{self, Charge};
use crate::ops::volume::recount;
use crate::ops::{Inputs, OpError, RecountContext, load, refuse_snapshot, store};
use crate::protocol::{
    InodeKind, LengthReport, MetaError, MetaReply, Reservation, SESSION_ROW_BYTES, SessionId,
};
use crate::rows::{self, InodeRow, SessionRow};
use crate::written::{RANGES_MAX, Written};

/// Charge of a write session.
const SESSION_BYTES: i64 = SESSION_ROW_BYTES as i64;

/// `MetaChange::ReportLengths`.
pub(crate) struct ReportLengths<'a> {
    pub reports: &'a [LengthReport],
    pub ends: &'a [(InodeId, SessionId)],
    pub inputs: Inputs,
}

impl Operation for ReportLengths<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut inodes = Vec::with_capacity(self.reports.len());
        for report in self.reports {
            match grow(txn, report, &self.inputs).await {
                Ok(row) => inodes.push(Ok(row.inode)),
                // A part of it is already in the transaction.
                Err(OpError::Refused(error @ MetaError::NoSpace { .. })) => {
                    return Err(error.into());
                }
                Err(OpError::Refused(error)) => inodes.push(Err(error)),
                Err(error) => return Err(error),
            }
        }
        for (inode, session) in self.ends {
            end_session(txn, *inode, *session, &self.inputs.recount_context()).await?;
        }
        Ok(MetaReply::Inodes(inodes))
    }
}

/// `MetaChange::Reserve`.
pub(crate) struct Reserve<'a> {
    pub reservations: &'a [Reservation],
    pub client: ClientId,
    /// Set if the store is too full for new sessions.
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
    reservation: &Reservation,
    client: ClientId,
    full: Option<&MetaError>,
) -> Result<InodeRow, OpError> {
    refuse_snapshot(reservation.inode, "")?;
    let mut row = load(txn, reservation.inode, "").await?;
    let InodeKind::File { truncate_version, layout, .. } = &row.inode.kind else {
        return Err(not_a_file(&row));
    };
    check_length(reservation.end, layout)?;
    if reservation.truncate_version != *truncate_version {
        return Ok(row);
    }
    if txn.get(&rows::trim(reservation.inode)).await?.is_some() {
        return Err(OpError::TrimPending(reservation.inode));
    }
    // First, so that a refusal leaves nothing of the reservation in the transaction.
    start_session(txn, &mut row, reservation.session, client, full).await?;
    if let InodeKind::File { reserved, .. } = &mut row.inode.kind {
        *reserved = reservation.end.max(*reserved);
    }
    row.end_max = row.end_max.max(reservation.end);
    recharge(txn, &mut row).await?;
    store(txn, &mut row).await?;
    Ok(row)
}

/// Starts a write session, unless it exists. Its row counts for the file's quota, as names do:
/// nothing else bounds the number of sessions. Refused if the store is `full`. The caller stores
/// the inode.
pub(crate) async fn start_session(
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
    Ok(rows::write(txn, &key, &SessionRow { client, charged: true })?)
}

/// Charges the growth of a file. A file that lost its last name while it was closed counts again.
/// In a quota, the charge never decreases at once: see `recount`.
pub(crate) async fn recharge(txn: &mut Transaction, row: &mut InodeRow) -> Result<(), OpError> {
    let before = if row.charged { Charge::of(row) } else { Charge::default() };
    let end = row.needed_end();
    row.charged_end = match row.inode.quota {
        Some(_) => row.charged_end.max(end),
        None => end,
    };
    // While uncharged, the file had no share of the excess.
    row.excess = if row.charged { row.excess.min(row.charged_end - end) } else { 0 };
    row.charged = true;
    quota::charge(txn, row.inode.quota, Charge::of(row).since(before)).await
}

/// Ends a session; the last one of a file releases the reservation.
pub(crate) async fn end_session(
    txn: &mut Transaction,
    inode: InodeId,
    session: SessionId,
    context: &RecountContext,
) -> Result<(), OpError> {
    let key = rows::session(inode, session);
    let value = txn.get(&key).await?;
    let session_row = value.map(|value| SessionRow::decode(&key, &value)).transpose()?;
    txn.clear(&key);
    let is_last = txn.range(&KeyRange::prefix(&rows::sessions(inode)), 1).await?.is_empty();
    let Some(mut row) = rows::read_inode(txn, inode).await? else {
        return Ok(());
    };
    let charged = session_row.is_some_and(|session_row| session_row.charged);
    if charged {
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
    if charged || gives_back {
        store(txn, &mut row).await?;
    }
    Ok(())
}

/// Applies a report if it has the current truncate version and the file is shorter.
pub(crate) async fn grow(
    txn: &mut Transaction,
    report: &LengthReport,
    inputs: &Inputs,
) -> Result<InodeRow, OpError> {
    refuse_snapshot(report.inode, "")?;
    let mut row = load(txn, report.inode, "").await?;
    let owner = Owner::of(&row);
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
    // Normalized, and limited to the reported length.
    let mut reported = Written::default();
    reported.merge(&report.written);
    reported.cut(report.length, layout.chunk_bytes);
    written.merge(&reported);
    let excess = written.shorten(RANGES_MAX);
    if !excess.is_empty() {
        written.set_more(true);
        written_rows::add(txn, owner, &excess, inputs.full.as_ref()).await?;
    }
    row.end_max = row.end_max.max(report.length);
    // Also without growth: something was written.
    row.inode.modified = inputs.now;
    row.inode.changed = inputs.now;
    recharge(txn, &mut row).await?;
    store(txn, &mut row).await?;
    Ok(row)
}

/// Refuses lengths beyond the range of chunk indexes: kernels fail every lookup of a file beyond
/// 2^63, and a quota without a limit would use up the rest of those above it.
pub(crate) fn check_length(length: u64, layout: &Layout) -> Result<(), MetaError> {
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

pub(crate) fn not_a_file(row: &InodeRow) -> OpError {
    MetaError::Invalid {
        field: "inode".into(),
        value: row.inode.id.to_string(),
        reason: "it is not a file".into(),
    }
    .into()
}
