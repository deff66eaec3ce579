//! Calls of the metadata service, with what was done for whom in the errors.

use std::sync::Arc;
use std::time::Duration;

use fabric::auth::capability::{Capability, Presented};
use fabric::deadline::Deadline;
use fabric::rpc::{Fault, Lease, RpcError};
use threefs_core::ids::{ClientId, InodeId};
use threefs_meta::{
    Identity, MetaChange, MetaClient, MetaClientError, MetaQuery, MetaReply, RequestId,
};

use crate::capabilities::Capabilities;
use crate::config::ClientConfig;
use crate::error::{Attempts, ClientError};

/// Why one attempt at one storage service failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The call itself.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// It was not made: the file may not be written so far now, for its holder has no reservation
    /// there, or none any more.
    #[error("nothing is reserved there")]
    NotReserved,
}

pub(crate) struct Metadata {
    client: MetaClient,
    /// For whom, unless a call says otherwise.
    identity: Identity,
    capabilities: Capabilities,
    who: String,
    timeout: Duration,
}

impl Metadata {
    pub(crate) fn new(
        config: &ClientConfig,
        id: ClientId,
        lease: Lease,
        identity: Identity,
    ) -> Self {
        Self {
            identity,
            client: MetaClient::with_lease(&config.meta, &config.credentials, id, lease),
            capabilities: Capabilities::new(&config.credentials),
            who: format!("meta at {}", config.meta),
            timeout: config.timeout,
        }
    }

    pub(crate) async fn query(
        &self,
        what: &str,
        query: MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        self.query_as(&self.identity, what, query, deadline).await
    }

    pub(crate) async fn query_as(
        &self,
        who: &Identity,
        what: &str,
        query: MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        let result = self.client.query_as(who, query, deadline).await;
        result.map_err(|error| self.failed(what, error))
    }

    pub(crate) async fn change_with(
        &self,
        id: RequestId,
        who: &Identity,
        what: &str,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        let result = self.client.change_with(id, who, change, deadline).await;
        result.map(|reply| self.keep_reserved(reply)).map_err(|error| self.failed(what, error))
    }

    pub(crate) async fn change(
        &self,
        what: &str,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        let result = self.client.change_as(&self.identity, change, deadline).await;
        result.map(|reply| self.keep_reserved(reply)).map_err(|error| self.failed(what, error))
    }

    /// Keeps the capabilities that came with an answer.
    fn keep_reserved(&self, reply: MetaReply) -> MetaReply {
        let MetaReply::Reserved { inodes, capabilities } = reply else { return reply };
        for (inode, capability) in inodes.iter().zip(capabilities) {
            if let (Ok(inode), Some(capability)) = (inode, capability) {
                self.capabilities.keep(inode.id, capability);
            }
        }
        MetaReply::Inodes(inodes)
    }

    /// What the storage services must be shown for a file, to write bytes of it below an end.
    pub(crate) async fn shown(
        self: &Arc<Self>,
        file: Option<(InodeId, u64)>,
        deadline: Deadline,
    ) -> Result<Presented, CallError> {
        // Holders of the key need nothing.
        let needed = file.filter(|_| self.capabilities.needed());
        let Some((inode, end)) = needed else { return Ok(Presented::Nothing) };
        if let Some(found) = self.capabilities.get(inode, end) {
            if found.renew {
                let metadata = Arc::clone(self);
                tokio::spawn(async move {
                    let renewed = metadata.ask(inode, Deadline::after(metadata.timeout)).await;
                    if let Err(error) = renewed {
                        tracing::debug!(%inode, %error, "its capability is not renewed yet");
                        metadata.capabilities.not_renewed(inode);
                    }
                });
            }
            return Ok(Presented::Capability(found.capability));
        }
        match self.ask(inode, deadline).await? {
            (capability, known) if known >= end => Ok(Presented::Capability(capability)),
            _ => Err(CallError::NotReserved),
        }
    }

    /// Asks for a new capability and keeps it; gives it with the end of what it is good for.
    async fn ask(&self, inode: InodeId, deadline: Deadline) -> Result<(Capability, u64), RpcError> {
        let query = MetaQuery::Capabilities { inodes: vec![inode] };
        let refused = |detail: String| RpcError::Faulted {
            context: threefs_meta::protocol::CONTEXT.into(),
            peer: self.who.clone(),
            fault: Fault::forbidden(detail),
        };
        match self.client.query(query, deadline).await {
            Ok(MetaReply::Capabilities(capabilities)) => match &capabilities[..] {
                [Some(capability)] => {
                    let end = self.capabilities.keep(inode, capability.clone());
                    Ok((capability.clone(), end))
                }
                _ => Err(refused(format!("{inode} does not exist"))),
            },
            Ok(other) => Err(refused(format!("{other:?} in place of a capability"))),
            Err(MetaClientError::Rpc(error)) => Err(error),
            Err(error) => Err(refused(error.to_string())),
        }
    }

    /// The storage service did not take it.
    pub(crate) fn forget_capability(&self, file: Option<(InodeId, u64)>) {
        if let Some((inode, _)) = file {
            self.capabilities.forget(inode);
        }
    }

    fn failed(&self, what: &str, error: MetaClientError) -> ClientError {
        let mut attempts = Attempts::of(what);
        match error {
            MetaClientError::Rpc(error) => match attempts.rpc(&self.who, &error) {
                Ok(()) => attempts.unavailable(self.timeout),
                Err(error) => error,
            },
            MetaClientError::Refused(error) if error.retryable() => {
                attempts.failed(&self.who, error);
                attempts.unavailable(self.timeout)
            }
            unknown @ MetaClientError::Unknown { .. } => {
                attempts.failed(&self.who, unknown);
                attempts.unavailable(self.timeout)
            }
            MetaClientError::Refused(error) => ClientError::Meta(error),
            unexpected @ MetaClientError::Unexpected { .. } => {
                ClientError::Protocol { who: self.who.clone(), detail: unexpected.to_string() }
            }
        }
    }
}
