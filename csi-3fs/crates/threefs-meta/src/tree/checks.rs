//! Checks of a request before its operation runs, and the wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

use threefs_kv::Room;

use crate::identity::{GROUPS_MAX, Identity};
use crate::protocol::{
    BATCH_MAX, LengthReport, LockChange, MetaChange, MetaError, Nanoseconds, REPORT_RANGES_MAX,
    SnapshotChange,
};

pub(crate) fn check_identity(caller: &Identity) -> Result<(), MetaError> {
    if caller.groups.len() <= GROUPS_MAX {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: "who.groups".into(),
        value: caller.groups.len().to_string(),
        reason: format!("a caller has at most {GROUPS_MAX} groups"),
    })
}

/// The error for changes that need space: the rest of a nearly full store is reserved for removals.
pub(crate) fn full(room: Option<Room>) -> Option<MetaError> {
    let room = room.filter(Room::is_low)?;
    let detail = format!(
        "{} of {} bytes are in use and the rest is reserved for removals; remove files, or give the \
         metadata service a larger volume and `map_bytes_max`",
        room.used_bytes, room.max_bytes
    );
    Some(MetaError::NoSpace { detail })
}

/// Whether a change adds permanent rows.
pub(crate) fn grows(change: &MetaChange) -> bool {
    match change {
        MetaChange::Create { .. }
        | MetaChange::MakeDirectory { .. }
        | MetaChange::MakeSymlink { .. }
        | MetaChange::MakeSpecial { .. }
        | MetaChange::Link { .. } => true,
        MetaChange::SetAttribute { value, .. } => value.is_some(),
        MetaChange::Open { .. }
        | MetaChange::Close { .. }
        | MetaChange::ReportLengths { .. }
        | MetaChange::Reserve { .. }
        | MetaChange::SetLength { .. }
        | MetaChange::Rename { .. }
        | MetaChange::Unlink { .. }
        | MetaChange::RemoveDirectory { .. }
        | MetaChange::RemoveTree { .. }
        | MetaChange::SetAttributes { .. }
        | MetaChange::SetQuota { .. }
        | MetaChange::Trash(_)
        | MetaChange::Snapshot(SnapshotChange::Remove { .. }) => false,
        MetaChange::Snapshot(SnapshotChange::Create { .. }) => true,
        MetaChange::Lock(change) => {
            matches!(change, LockChange::Start { .. } | LockChange::Set { .. })
        }
    }
}

/// Whether a change reports written chunks, which may need further rows.
pub(crate) fn reports(change: &MetaChange) -> bool {
    matches!(change, MetaChange::ReportLengths { .. } | MetaChange::Close { report: Some(_), .. })
}

pub(crate) fn check_batch(field: &str, length: usize) -> Result<(), MetaError> {
    if length <= BATCH_MAX {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: field.into(),
        value: length.to_string(),
        reason: format!("a batch has at most {BATCH_MAX} entries; split it"),
    })
}

pub(crate) fn check_ranges<'a>(
    reports: impl Iterator<Item = &'a LengthReport>,
) -> Result<(), MetaError> {
    let ranges: usize = reports.map(|report| report.written.ranges()).sum();
    if ranges <= REPORT_RANGES_MAX {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: "written".into(),
        value: ranges.to_string(),
        reason: format!("a change reports at most {REPORT_RANGES_MAX} ranges; split it"),
    })
}

/// Wall-clock time, for display only: it need not be monotonic.
pub(crate) fn now() -> Nanoseconds {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Nanoseconds(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}
