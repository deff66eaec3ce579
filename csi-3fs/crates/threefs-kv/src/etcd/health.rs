//! Upkeep of a cluster: compaction of old revisions, space and alarms.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{AlarmAction, AlarmType, StatusResponse};
use tokio::time::Instant;

use super::batch::Shared;
use super::members::CALL_TIMEOUT;
use super::open;
use super::rows::{signed, unsigned};
use crate::Room;

/// Period of the checks.
const PERIOD: Duration = Duration::from_secs(5);
/// Checks between two records of the cluster that serves the store.
const CHECKS_PER_RECORD: u64 = 12;
/// Revisions that are kept: snapshots read at them.
const KEPT: Duration = Duration::from_secs(90);
/// etcd before 3.6 does not report its quota; this is its default.
const QUOTA_DEFAULT: u64 = 2 << 30;
/// Share of the quota, in percent, above which a warning is logged.
const WARNING_PERCENT: u64 = 80;

/// Space of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Space {
    file_bytes: u64,
    used_bytes: u64,
    quota_bytes: u64,
}

pub(crate) struct Health {
    shared: Arc<Shared>,
    room: Arc<Mutex<Option<Room>>>,
    /// Newest revision at each check.
    checks: VecDeque<(Instant, u64)>,
    alarm: bool,
}

impl Health {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, room: Arc::default(), checks: VecDeque::new(), alarm: false }
    }

    /// Space of the fullest member, as of the last check.
    pub(crate) fn room(&self) -> Arc<Mutex<Option<Room>>> {
        Arc::clone(&self.room)
    }

    /// Repeats the checks until the store is closed.
    pub(crate) async fn run(mut self) {
        for count in 1u64.. {
            tokio::time::sleep(PERIOD).await;
            self.check().await;
            self.compact().await;
            if count % CHECKS_PER_RECORD == 0
                && let Err(error) = open::record(&self.shared.members, &self.shared.rows).await
            {
                tracing::warn!(%error, "the cluster cannot be recorded");
            }
        }
    }

    /// Reads the space of all members, and the alarms.
    pub(crate) async fn check(&mut self) {
        let members = &self.shared.members;
        let (mut spaces, mut leader) = (Vec::new(), None);
        for member in 0..members.len() {
            let status = members
                .call(member, CALL_TIMEOUT, |mut client| async move { client.status().await });
            match status.await {
                Ok(status) => {
                    if status.header().map(|header| header.member_id()) == Some(status.leader()) {
                        leader = Some(member);
                    }
                    spaces.push(space(&status));
                }
                Err(error) => {
                    let endpoint = members.endpoint(member);
                    tracing::debug!(endpoint, ?error, "an etcd member does not reply");
                }
            }
        }
        // Others forward writes to it.
        if let Some(leader) = leader {
            members.prefer(leader);
        }
        let alarms = members.call(members.preferred(), CALL_TIMEOUT, |mut client| async move {
            client.alarm(AlarmAction::Get, AlarmType::None, None).await
        });
        if let Ok(reply) = alarms.await {
            let alarm = reply.alarms().iter().any(|it| it.alarm() == AlarmType::Nospace);
            if alarm && !self.alarm {
                let error = members.no_space("the alarm NOSPACE is raised");
                tracing::error!(%error, "etcd refuses writes");
            }
            self.alarm = alarm;
        }
        let Some(room) = room(&spaces, self.alarm) else { return };
        let percent = room.used_bytes.saturating_mul(100) / room.max_bytes.max(1);
        if percent >= WARNING_PERCENT {
            tracing::warn!(percent, quota = room.max_bytes, "etcd is nearly full");
        }
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) = Some(room);
    }

    /// Compacts revisions that are old enough. Another process may do so as well.
    async fn compact(&mut self) {
        let now = Instant::now();
        self.checks.push_back((now, self.shared.members.newest()));
        let mut revision = None;
        while self.checks.front().is_some_and(|(at, _)| now - *at >= KEPT) {
            revision = self.checks.pop_front().map(|(_, newest)| newest);
        }
        let (Some(revision), members) = (revision.filter(|it| *it > 0), &self.shared.members)
        else {
            return;
        };
        let compacted = members.call(members.preferred(), CALL_TIMEOUT, |mut client| async move {
            client.compact(signed(revision), None).await
        });
        if let Err(error) = compacted.await {
            tracing::debug!(revision, ?error, "compaction failed; the next check repeats it");
        }
    }
}

fn space(status: &StatusResponse) -> Space {
    let quota_bytes = match unsigned(status.db_size_quota()) {
        0 => QUOTA_DEFAULT,
        quota => quota,
    };
    let (file_bytes, used) = (status.db_size(), status.raft_used_db_size());
    Space { file_bytes: unsigned(file_bytes), used_bytes: unsigned(used), quota_bytes }
}

/// Space of the fullest member. Free pages of a file are used again, but a file that is near the
/// quota has to be defragmented first.
fn room(spaces: &[Space], alarm: bool) -> Option<Room> {
    let rooms = spaces.iter().map(|space| {
        let Space { file_bytes, used_bytes, quota_bytes } = *space;
        // etcd compares the size of the file with the quota.
        let file = Room { used_bytes: file_bytes.min(quota_bytes), max_bytes: quota_bytes };
        match (alarm, file.is_low()) {
            (true, _) => Room { used_bytes: quota_bytes, ..file },
            (false, true) => file,
            (false, false) => Room { used_bytes, ..file },
        }
    });
    rooms.min_by_key(|room| room.max_bytes.saturating_sub(room.used_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_member_counts_and_a_file_at_its_quota_is_full() {
        let space = |file_bytes, used_bytes| Space { file_bytes, used_bytes, quota_bytes: 1000 };
        let used = |spaces: &[Space], alarm| room(spaces, alarm).map(|it| it.used_bytes);
        assert_eq!(used(&[], false), None);
        assert_eq!(used(&[space(899, 300), space(800, 400)], false), Some(400));
        assert_eq!(used(&[space(900, 300), space(800, 400)], false), Some(900));
        assert_eq!(used(&[space(1000, 300), space(800, 400)], false), Some(1000));
        assert_eq!(used(&[space(900, 300)], true), Some(1000));
        assert!(room(&[space(950, 900)], false).is_some_and(|room| room.is_low()));
    }
}
