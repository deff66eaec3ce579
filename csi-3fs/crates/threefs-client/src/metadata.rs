//! Calls of the metadata service; errors name the operation.

use std::sync::Arc;
use std::time::Duration;

use fabric::auth::capability::{Capability, Presented};
use fabric::deadline::Deadline;
use fabric::rpc::{Fault, FaultCode, Lease, RpcError};
use threefs_core::fence::VolumeEpoch;
use threefs_core::ids::{ClientId, InodeId};
use threefs_meta::protocol::ServiceRole;
use threefs_meta::{
    Identity, MetaChange, MetaClient, MetaClientError, MetaQuery, MetaReply, RequestId,
};

use crate::capabilities::Capabilities;
use crate::config::ClientConfig;
use crate::error::{Attempts, CallError, ClientError};
use crate::places::Places;

pub(crate) struct Metadata {
    client: MetaClient,
    /// Default identity of calls.
    identity: Identity,
    capabilities: Capabilities,
    places: Places,
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
            places: Places::default(),
            who: format!("meta at {}", config.meta.join(", ")),
            timeout: config.timeout,
        }
    }

    /// See [`MetaClient::switches`].
    pub(crate) fn switches(&self) -> usize {
        self.client.switches()
    }

    /// See [`MetaClient::role_of_each`].
    pub(crate) async fn role_of_each(
        &self,
        deadline: Deadline,
    ) -> Vec<Result<ServiceRole, MetaClientError>> {
        self.client.role_of_each(deadline).await
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
        result.map_err(|error| self.error_of(what, error))
    }

    pub(crate) async fn change_with(
        &self,
        id: RequestId,
        who: &Identity,
        what: &str,
        change: MetaChange,
        lease: &Lease,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        let result = self.client.change_under(id, who, change, lease, deadline).await;
        result
            .map(|reply| self.store_capabilities(reply))
            .map_err(|error| self.error_of(what, error))
    }

    pub(crate) async fn change(
        &self,
        what: &str,
        change: MetaChange,
        lease: &Lease,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        let result = self.client.change_as(&self.identity, change, lease, deadline).await;
        result
            .map(|reply| self.store_capabilities(reply))
            .map_err(|error| self.error_of(what, error))
    }

    /// Stores the capabilities of a reply.
    fn store_capabilities(&self, reply: MetaReply) -> MetaReply {
        let MetaReply::Reserved { inodes, capabilities } = reply else { return reply };
        for (inode, capability) in inodes.iter().zip(capabilities) {
            if let (Ok(inode), Some(capability)) = (inode, capability) {
                self.keep(inode.id, capability);
            }
        }
        MetaReply::Inodes(inodes)
    }

    /// The capability to present to storage services for a file, to write its bytes below an end.
    pub(crate) async fn capability_for(
        self: &Arc<Self>,
        file: Option<(InodeId, u64)>,
        deadline: Deadline,
    ) -> Result<Presented, CallError> {
        // Clients with the cluster's key need no capability.
        let file_with_capability = file.filter(|_| self.capabilities.are_required());
        let Some((inode, end)) = file_with_capability else { return Ok(Presented::Nothing) };
        if let Some(cached) = self.capabilities.get(inode, end) {
            if cached.renew {
                let metadata = Arc::clone(self);
                tokio::spawn(async move {
                    let renewed =
                        metadata.request_capability(inode, Deadline::after(metadata.timeout)).await;
                    if let Err(error) = renewed {
                        tracing::debug!(%inode, %error, "could not renew a capability");
                        metadata.capabilities.renewal_failed(inode);
                    }
                });
            }
            return Ok(Presented::Capability(cached.capability));
        }
        match self.request_capability(inode, deadline).await? {
            (capability, current) if current >= end => Ok(Presented::Capability(capability)),
            _ => Err(CallError::NotReserved),
        }
    }

    /// Requests a new capability and stores it; returns it with the end of its range.
    async fn request_capability(
        &self,
        inode: InodeId,
        deadline: Deadline,
    ) -> Result<(Capability, u64), RpcError> {
        let query = MetaQuery::Capabilities { inodes: vec![inode] };
        let forbidden = |detail: String| RpcError::Faulted {
            context: threefs_meta::protocol::CONTEXT.into(),
            peer: self.who.clone(),
            fault: Fault::forbidden(detail),
        };
        match self.client.query(query, deadline).await {
            Ok(MetaReply::Capabilities(capabilities)) => match &capabilities[..] {
                [Some(capability)] => {
                    let (end, _) = self.keep(inode, capability.clone());
                    Ok((capability.clone(), end))
                }
                _ => Err(forbidden(format!("{inode} does not exist"))),
            },
            Ok(other) => Err(forbidden(format!("expected a capability, got {other:?}"))),
            Err(MetaClientError::Rpc(error)) => Err(error),
            Err(error) => Err(forbidden(error.to_string())),
        }
    }

    /// Stores a capability; returns the end of the bytes that it permits to write, and the place.
    fn keep(&self, inode: InodeId, capability: Capability) -> (u64, Option<VolumeEpoch>) {
        let (end, place) = self.capabilities.keep(inode, capability);
        if let Some(place) = place {
            self.places.learn(inode, place);
        }
        (end, place)
    }

    /// Volume and epoch of files.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Requests volume and epoch of a file: a holder of a ticket with a capability.
    pub(crate) async fn learn_place(
        &self,
        inode: InodeId,
        deadline: Deadline,
    ) -> Result<VolumeEpoch, ClientError> {
        let what = format!("renew the epoch of {inode}");
        let absent = || ClientError::Stale { path: inode.to_string() };
        if self.capabilities.are_required() {
            let query = MetaQuery::Capabilities { inodes: vec![inode] };
            return match self.query(&what, query, deadline).await? {
                MetaReply::Capabilities(mut capabilities) => {
                    let capability = capabilities.pop().flatten().ok_or_else(absent)?;
                    self.keep(inode, capability).1.ok_or_else(absent)
                }
                other => Err(ClientError::unexpected("meta", &other)),
            };
        }
        let query = MetaQuery::Epochs { inodes: vec![inode] };
        match self.query(&what, query, deadline).await? {
            MetaReply::Epochs(mut epochs) => {
                let place = epochs.pop().flatten().ok_or_else(absent)?;
                self.places.learn(inode, place);
                Ok(place)
            }
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Learns the current epoch of a file's volume: a holder of a ticket from a new capability, which
    /// the next attempt requests.
    pub(crate) async fn renew_place(
        &self,
        inode: InodeId,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        if self.capabilities.are_required() {
            self.capabilities.forget(inode);
            return Ok(());
        }
        self.learn_place(inode, deadline).await.map(drop)
    }

    /// The storage service has rejected the capability.
    pub(crate) fn forget_capability(&self, file: Option<(InodeId, u64)>) {
        if let Some((inode, _)) = file {
            self.capabilities.forget(inode);
        }
    }

    fn error_of(&self, what: &str, error: MetaClientError) -> ClientError {
        let mut attempts = Attempts::of(what);
        match error {
            // The service cannot decode the request: it is of another release.
            MetaClientError::Rpc(RpcError::Faulted { fault, .. })
                if fault.code == FaultCode::BadRequest =>
            {
                ClientError::Protocol { who: self.who.clone(), detail: fault.detail }
            }
            MetaClientError::Rpc(error) => match attempts.rpc(&self.who, &error) {
                Ok(()) => attempts.unavailable(self.timeout),
                Err(error) => error,
            },
            MetaClientError::Refused(error) if error.retryable() => {
                attempts.record_failure(&self.who, error);
                attempts.unavailable(self.timeout)
            }
            unknown @ MetaClientError::Unknown { .. } => {
                attempts.record_failure(&self.who, unknown);
                attempts.unavailable(self.timeout)
            }
            MetaClientError::Refused(error) => ClientError::Meta(error),
        }
    }
}
