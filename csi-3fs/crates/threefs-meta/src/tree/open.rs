//! Open files of clients: opening a file, and the reports of clients.

use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};

use crate::identity::Identity;
use crate::ops::{self, OpError};
use crate::protocol::{At, BATCH_MAX, MetaReply};
use crate::tree::Tree;

impl Tree {
    pub(super) async fn open_file(
        &self,
        caller: &Identity,
        at: &At,
        access: u32,
        client: ClientId,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        let _opening = self.openings.start();
        let service = (!self.services.alone).then(|| self.open_files.run_id());
        let open = ops::OpenInode { caller, at, access, service };
        // The open file is recorded before the read if the request names the inode, and always
        // after it, because a path may lead to another inode.
        let is_new = at.path.is_empty()
            && self.open_files.open(client, caller.scope, at.directory, self.uptime_ms());
        let opened = match self.store.transact(deadline, &open).await {
            Ok(MetaReply::Inode(inode)) => {
                self.open_files.open(client, caller.scope, inode.id, self.uptime_ms());
                let removed = !inode.is_directory() && inode.links == 0;
                match removed && !self.hold_removed(&[inode.id]).await?.is_empty() {
                    true => Err(ops::not_found(&at.path, inode.id)),
                    false => Ok(MetaReply::Inode(inode)),
                }
            }
            other => other,
        };
        // An entry of an earlier open stays: the client still has that file open.
        if opened.is_err() && is_new {
            self.open_files.update(client, caller.scope, &[], &[at.directory], false, 0);
        }
        opened
    }

    pub(super) async fn report_open_files(
        &self,
        caller: &Identity,
        client: ClientId,
        add: &[InodeId],
        release: &[InodeId],
        all: bool,
    ) -> Result<MetaReply, OpError> {
        let now = self.uptime_ms();
        self.clients.note_activity(client, caller.scope, now);
        let update = |add: &[InodeId], release: &[InodeId], all| {
            self.open_files.update(client, caller.scope, add, release, all, now)
        };
        for part in add.chunks(BATCH_MAX) {
            update(part, &[], false);
            self.hold_removed(part).await?;
        }
        for part in release.chunks(BATCH_MAX) {
            update(&[], part, false);
            tokio::task::yield_now().await;
        }
        if all {
            self.release_former(client).await?;
        }
        let complete = update(&[], &[], all) && !self.holds.waits_for(client);
        Ok(MetaReply::OpenFilesReported { complete })
    }
}
