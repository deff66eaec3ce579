//! Check of removed files: which of them clients of this service, or of former services, have open.

use std::collections::{HashMap, HashSet};

use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};

use crate::background::{TRANSACTION_TIMEOUT, transaction};
use crate::clients::holds::{Checked, Hold};
use crate::ops::{self, OpError, Renewed};
use crate::rows::{HOLDS, REMOVALS};
use crate::tree::Tree;

/// Rows per transaction.
const PAGE: usize = 512;

impl Tree {
    /// Checks all removals of rounds that have ended and stores holds for files that clients of this
    /// service have open; removes holds of files that are closed. Renews this service's row, also
    /// during a long check.
    pub(crate) async fn check_removals(&self) -> Result<Renewed, OpError> {
        let mut checked = self.holds.checked.lock().await;
        if self.services.alone {
            self.check_after(&mut checked.round).await?;
            return Ok(Renewed::Alive);
        }
        let before = *checked;
        tokio::select! {
            biased;
            result = self.check_after(&mut checked.round) => result?,
            () = self.renew_until_removed(before) => return Ok(Renewed::Removed),
        }
        let renewed = self.renew(*checked).await?;
        if let Renewed::CheckAgain { departures } = renewed {
            *checked = Checked { round: 0, departures };
            self.service_departed();
        }
        Ok(renewed)
    }

    /// Checks the removals of rounds after `round`, which it advances.
    async fn check_after(&self, round: &mut u64) -> Result<(), OpError> {
        self.refresh_former().await?;
        let ended = self.store.transact(transaction(), &ops::EndedRound).await?;
        // Openings in progress may have read a file before its removal.
        if ended > *round
            && self.openings.wait_for_current(Deadline::after(TRANSACTION_TIMEOUT)).await
        {
            self.hold_open_files(*round, ended).await?;
            *round = ended;
        }
        self.release_closed_files().await
    }

    /// Renews this service's row with the result of the last check until the service is removed.
    async fn renew_until_removed(&self, last: Checked) {
        loop {
            tokio::time::sleep(self.renewal_interval()).await;
            match self.renew(last).await {
                Ok(Renewed::Removed) => return,
                // The renewal after the check handles departures.
                Ok(Renewed::Alive | Renewed::CheckAgain { .. }) => {}
                Err(error) => tracing::warn!(%error, "this service could not renew its row"),
            }
        }
    }

    async fn renew(&self, Checked { round, departures }: Checked) -> Result<Renewed, OpError> {
        let renew = ops::Renew { run_id: self.open_files.run_id(), checked: round, departures };
        self.store.transact(transaction(), &renew).await
    }

    /// The round up to which all services have checked the removals.
    pub(crate) async fn checked_by_all(&self) -> Result<u64, OpError> {
        let own = self.holds.checked.lock().await.round;
        if self.services.alone {
            return Ok(own);
        }
        let services = self.store.transact(transaction(), &ops::ListServices).await?;
        Ok(services.iter().map(|(_, row)| row.checked).min().unwrap_or(0).min(own))
    }

    async fn hold_open_files(&self, after: u64, until: u64) -> Result<(), OpError> {
        let run_id = self.open_files.run_id();
        let running: Vec<u64> = match self.services.alone {
            true => vec![run_id],
            false => {
                let services = self.store.transact(transaction(), &ops::ListServices).await?;
                services.into_iter().map(|(run_id, _)| run_id).collect()
            }
        };
        let mut from = match after {
            // Keys of earlier releases have no round.
            0 => REMOVALS.to_vec(),
            after => [REMOVALS, &(after + 1).to_be_bytes()].concat(),
        };
        let mut found_former = false;
        loop {
            let list = ops::ListRemoved { from: &from, until, limit: PAGE };
            let (removals, next) = self.store.transact(transaction(), &list).await?;
            let mut open = Vec::new();
            let mut holds = Vec::new();
            for removal in removals {
                if self.open_files.is_open(removal.inode) {
                    open.push(removal.inode);
                }
                // A service that runs checks its removals itself.
                if !removal.opened_by.is_empty() && !running.contains(&removal.run_id) {
                    let (inode, clients) = (removal.inode, removal.opened_by);
                    holds.push(Hold { inode, run_id: removal.run_id, clients });
                }
            }
            self.hold(&open).await?;
            if !holds.is_empty() {
                found_former = true;
                self.store.transact(transaction(), &ops::SetHolds(&holds)).await?;
            }
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        if found_former {
            self.holds.list_former();
            self.refresh_former().await?;
        }
        Ok(())
    }

    /// Stores holds for files that clients of this service have open. Returns those that cannot be
    /// read any more.
    async fn hold(&self, open: &[InodeId]) -> Result<Vec<InodeId>, OpError> {
        if open.is_empty() {
            return Ok(Vec::new());
        }
        let mut held = self.holds.held.lock().await;
        let run_id = self.open_files.run_id();
        let hold = |inode: &InodeId| Hold {
            inode: *inode,
            run_id,
            clients: self.open_files.clients_with_open(*inode),
        };
        let holds: Vec<Hold> = open.iter().map(hold).collect();
        let unreadable = self.store.transact(transaction(), &ops::SetHolds(&holds)).await?;
        held.extend(open);
        Ok(unreadable)
    }

    /// Stores holds for those of the files that have been removed. The caller has recorded that they
    /// are open. Returns those that cannot be read any more.
    pub(crate) async fn hold_removed(&self, open: &[InodeId]) -> Result<Vec<InodeId>, OpError> {
        let removed = self.store.transact(transaction(), &ops::Removed(open)).await?;
        self.hold(&removed).await
    }

    async fn release_closed_files(&self) -> Result<(), OpError> {
        let mut held = self.holds.held.lock().await;
        let closed: Vec<InodeId> =
            held.iter().filter(|inode| !self.open_files.is_open(**inode)).copied().collect();
        for inodes in closed.chunks(PAGE) {
            let clear = ops::ClearHolds { run_id: self.open_files.run_id(), inodes };
            self.store.transact(transaction(), &clear).await?;
            inodes.iter().for_each(|inode| _ = held.remove(inode));
        }
        Ok(())
    }

    /// A client has reported all its open files to this service: no hold of a former service waits
    /// for it any more.
    pub(crate) async fn release_former(&self, client: ClientId) -> Result<(), OpError> {
        let holds: Vec<Hold> = {
            let former = self.holds.former();
            former.holds.iter().filter(|hold| hold.clients.contains(&client)).cloned().collect()
        };
        for holds in holds.chunks(PAGE) {
            let release = ops::ReleaseFormer { client, holds };
            self.store.transact(transaction(), &release).await?;
        }
        let mut former = self.holds.former();
        former.holds.iter_mut().for_each(|hold| hold.clients.retain(|it| *it != client));
        former.holds.retain(|hold| !hold.clients.is_empty());
        Ok(())
    }

    /// Ends the holds of services that have been gone since `silent_since`: their clients have
    /// expired.
    pub(crate) async fn expire_former(&self, silent_since: u64) -> Result<(), OpError> {
        self.refresh_former().await?;
        let expired: HashMap<u64, Vec<InodeId>> = {
            let former = self.holds.former();
            let mut of_run: HashMap<u64, Vec<InodeId>> = HashMap::new();
            for hold in &former.holds {
                if former.since_ms.get(&hold.run_id).is_some_and(|since| *since <= silent_since) {
                    of_run.entry(hold.run_id).or_default().push(hold.inode);
                }
            }
            of_run
        };
        for (run_id, inodes) in &expired {
            for inodes in inodes.chunks(PAGE) {
                self.as_collector(&ops::ClearHolds { run_id: *run_id, inodes }).await?;
            }
        }
        self.holds.former().holds.retain(|hold| !expired.contains_key(&hold.run_id));
        Ok(())
    }

    /// Lists the holds of former services if some may be new or released through another service.
    async fn refresh_former(&self) -> Result<(), OpError> {
        {
            let former = self.holds.former();
            if former.listed && (former.holds.is_empty() || self.services.alone) {
                return Ok(());
            }
        }
        let own = self.open_files.run_id();
        let running: HashSet<u64> = match self.services.alone {
            true => HashSet::from([own]),
            false => {
                let services = self.store.transact(transaction(), &ops::ListServices).await?;
                services.into_iter().map(|(run_id, _)| run_id).chain([own]).collect()
            }
        };
        let (mut from, mut holds) = (HOLDS.to_vec(), Vec::new());
        loop {
            let list = ops::ListHolds { from: &from, limit: PAGE };
            let (page, next) = self.store.transact(transaction(), &list).await?;
            holds.extend(page.into_iter().filter(|hold| !running.contains(&hold.run_id)));
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        let now_ms = self.uptime_ms();
        let mut former = self.holds.former();
        former.since_ms.retain(|run_id, _| holds.iter().any(|hold| hold.run_id == *run_id));
        for hold in &holds {
            former.since_ms.entry(hold.run_id).or_insert(now_ms);
        }
        (former.holds, former.listed) = (holds, true);
        Ok(())
    }
}
