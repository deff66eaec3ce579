//! Execution of requests about the trash of a volume.

use fabric::deadline::Deadline;

use crate::identity::Identity;
use crate::ops::{self, Inputs, OpError};
use crate::protocol::{MetaError, MetaReply, TRASH_PAGE_MAX, TrashAnswer, TrashChange, TrashQuery};
use crate::rows::TRASH;
use crate::tree::Tree;
use crate::tree::change::ChangeCall;

impl Tree {
    pub(super) async fn change_trash(
        &self,
        call: &ChangeCall<'_>,
        change: &TrashChange,
        inputs: Inputs,
    ) -> Result<MetaReply, OpError> {
        let (caller, open_files) = (call.caller, &self.open_files);
        match change {
            TrashChange::Keep { at, seconds } => {
                self.run_once(call, ops::KeepRemoved { caller, at, seconds: *seconds }).await
            }
            TrashChange::Restore { at, id, to } => {
                let (id, to) = (*id, to.as_ref());
                self.run_once(call, ops::RestoreRemoved { caller, at, id, to, inputs }).await
            }
            TrashChange::Purge { at, ids } => {
                if ids.len() > TRASH_PAGE_MAX {
                    return Err(MetaError::Invalid {
                        field: "ids".into(),
                        value: ids.len().to_string(),
                        reason: format!("a purge has at most {TRASH_PAGE_MAX} entries; split it"),
                    }
                    .into());
                }
                self.run_once(call, ops::PurgeRemoved { caller, at, ids, open_files, inputs }).await
            }
        }
    }

    pub(super) async fn query_trash(
        &self,
        caller: &Identity,
        query: &TrashQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        match query {
            TrashQuery::List { at, after } => {
                let list = ops::ListTrash { caller, at, after: *after };
                self.store.transact(deadline, &list).await
            }
            TrashQuery::Count => {
                let count = self.count(TRASH, deadline).await?;
                Ok(MetaReply::Trash(TrashAnswer::Count(count)))
            }
        }
    }
}
