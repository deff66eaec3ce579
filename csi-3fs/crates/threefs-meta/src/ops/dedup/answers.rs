//! Space for the answers that are kept for retries, by volume.
//!
//! The clients of one volume share a limit in bytes, whatever the number of client ids. A change
//! whose answer does not fit is refused, so no answer is dropped that a client may still request.
//! The limit of a volume decreases as the total grows, so that many volumes leave room for each
//! other. Clients with the cluster key are not counted.

use threefs_core::ids::ClientId;
use threefs_kv::{KvError, Room, Transaction};

use crate::ops::OpError;
use crate::protocol::MetaError;
use crate::rows::{self, ALL_VOLUMES, AnswerRow};

/// Maximum per volume: at 5,000 changes per second, the answers of a hundred seconds, longer than
/// any call.
const OF_VOLUME_MAX: i64 = 128 << 20;
/// Minimum per volume, whatever the number of volumes.
const OF_VOLUME_MIN: i64 = 1 << 20;
/// The fraction of the store for all volumes.
const PART_OF_STORE: u64 = 16;
/// The fraction of the remaining total for one volume.
const PART_OF_REST: i64 = 8;

/// Space for answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerBudget {
    /// Limit for all volumes together.
    total: i64,
}

impl AnswerBudget {
    /// The budget for a store; `None` = unlimited. The rest of a nearly full store is reserved for
    /// removals, whose answers are short.
    pub(crate) fn of(room: Option<Room>) -> Self {
        let total = match room {
            Some(room) if room.is_low() => 0,
            Some(room) => i64::try_from(room.max_bytes / PART_OF_STORE).unwrap_or(i64::MAX),
            None => i64::MAX,
        };
        Self { total }
    }

    fn of_volume(self, used_by_all: i64) -> i64 {
        let part = self.total.saturating_sub(used_by_all) / PART_OF_REST;
        part.clamp(OF_VOLUME_MIN, OF_VOLUME_MAX)
    }
}

/// Stores an answer. The commit is refused if the volume's answers do not fit, after those that the
/// same transaction drops.
pub(crate) async fn keep(
    txn: &mut Transaction,
    key: &[u8],
    row: &AnswerRow,
    room: AnswerBudget,
) -> Result<(), OpError> {
    rows::write(txn, key, row)?;
    let Some(volume) = row.volume else { return Ok(()) };
    let all = rows::answer_bytes(ALL_VOLUMES);
    let used = match txn.snapshot_get(&all).await? {
        Some(bytes) => bytes.try_into().map_err(|_| KvError::bad_row(&all, "not a counter"))?,
        None => [0; 8],
    };
    let max = room.of_volume(i64::from_le_bytes(used));
    txn.bounded_add(&rows::answer_bytes(volume), row.bytes(), max);
    txn.bounded_add(&all, row.bytes(), i64::MAX);
    Ok(())
}

/// Drops the answers of finished changes of a client and raises its floor above them: a late
/// duplicate of a change, through any service, is refused and not executed again.
pub(crate) async fn forget(
    txn: &mut Transaction,
    client: ClientId,
    finished: impl IntoIterator<Item = u64>,
) -> Result<(), OpError> {
    let mut below = 0;
    for sequence in finished {
        below = below.max(sequence.saturating_add(1));
        drop_answer(txn, &rows::answer(client, sequence)).await?;
    }
    if below > 0 {
        rows::raise_floor(txn, client, below).await?;
    }
    Ok(())
}

async fn drop_answer(txn: &mut Transaction, key: &[u8]) -> Result<(), OpError> {
    let Some(value) = txn.get(key).await? else { return Ok(()) };
    txn.clear(key);
    let row = AnswerRow::decode(key, &value)?;
    if let Some(volume) = row.volume {
        for counter in [volume, ALL_VOLUMES] {
            txn.bounded_add(&rows::answer_bytes(counter), -row.bytes(), i64::MAX);
        }
    }
    Ok(())
}

/// The error for an answer that does not fit.
pub(crate) fn full(key: &[u8], used: i64, more: i64, max: i64) -> MetaError {
    let volume = rows::inode_of_key(key).unwrap_or(ALL_VOLUMES);
    MetaError::AnswersFull { volume, used, more, max }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With any number of volumes at their limits, the total stays below its fraction of the store,
    /// and one more volume has room.
    #[test]
    fn volumes_at_their_bounds_leave_capacity_to_others() {
        let room = AnswerBudget::of(Some(Room { used_bytes: 0, max_bytes: 64 << 30 }));
        assert_eq!(room.of_volume(0), OF_VOLUME_MAX);
        let mut used = 0;
        for _ in 0..1_000 {
            used += room.of_volume(used);
        }
        assert!(used <= (4 << 30) + 1_000 * OF_VOLUME_MIN, "{used}");
        assert_eq!(room.of_volume(i64::MAX), OF_VOLUME_MIN);
        let low = AnswerBudget::of(Some(Room { used_bytes: 60 << 30, max_bytes: 64 << 30 }));
        assert_eq!(low.of_volume(0), OF_VOLUME_MIN);
        assert_eq!(AnswerBudget::of(None).of_volume(0), OF_VOLUME_MAX);
    }
}
