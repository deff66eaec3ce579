//! Files that snapshots show.

use threefs_core::ids::InodeId;
use threefs_meta::{AuditAnswer, AuditQuery, MetaQuery, MetaReply, ShownFile};

use super::unexpected;
use crate::Client;
use crate::error::ClientError;

impl Client {
    /// The states that snapshots show of the files among the inodes after `after` up to `until`, and
    /// the inode up to which these are all.
    pub(super) async fn shown_of(
        &self,
        after: InodeId,
        until: InodeId,
    ) -> Result<(Vec<ShownFile>, InodeId), ClientError> {
        let query = MetaQuery::Audit(AuditQuery::Shown { after, until });
        match self.0.metadata.query("audit", query, self.deadline()).await {
            Ok(MetaReply::Audit(AuditAnswer::Shown { files, until })) if until > after => {
                Ok((files, until))
            }
            Ok(MetaReply::Audit(_)) => Err(unexpected()),
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            // The service is of a release without snapshots.
            Err(ClientError::Protocol { .. }) => Ok((Vec::new(), until)),
            Err(error) => Err(error),
        }
    }
}
