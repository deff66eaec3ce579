//! Repair of counters of the metadata, as `threefs fsck --repair` makes it: see `ops::repair` of the
//! metadata service.

use threefs_meta::{AuditQuery, CORRECTIONS_PER_STEP, Correction, MetaQuery, MetaReply};

use crate::Client;
use crate::error::ClientError;

impl Client {
    /// Starts a repair; a snapshot that is taken after it has its number.
    ///
    /// # Errors
    /// The metadata service does not answer, or refuses.
    pub async fn start_repair(&self) -> Result<u64, ClientError> {
        let repair = rand::random();
        self.ask_repair(AuditQuery::StartRepair { repair }).await?;
        Ok(repair)
    }

    /// Applies corrections that were computed from a snapshot with the number of the repair. Each is
    /// applied once, whatever fails meanwhile; after an error, those of some steps may be missing.
    ///
    /// # Errors
    /// The metadata service does not answer, or another repair has started since.
    pub async fn repair(&self, repair: u64, corrections: &[Correction]) -> Result<(), ClientError> {
        for (step, corrections) in (0..).zip(corrections.chunks(CORRECTIONS_PER_STEP)) {
            let corrections = corrections.to_vec();
            self.ask_repair(AuditQuery::Repair { repair, step, corrections }).await?;
        }
        Ok(())
    }

    async fn ask_repair(&self, query: AuditQuery) -> Result<(), ClientError> {
        match self.0.metadata.query("repair", MetaQuery::Audit(query), self.deadline()).await? {
            MetaReply::Done => Ok(()),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }
}
