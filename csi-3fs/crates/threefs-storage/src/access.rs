//! Which requests a volume's credential may make: those of clients, for files that the metadata
//! service gave it a capability for. What replicas ask of each other needs the cluster's key.

use fabric::capability::Capability;
use fabric::keys::Keys;
use fabric::rpc::Fault;
use fabric::ticket::Grant;
use threefs_core::ids::InodeId;
use threefs_core::message::StorageRequest;

pub(crate) fn permit(
    grant: &Grant,
    request: &StorageRequest,
    capability: Option<&Capability>,
    keys: &Keys,
    now_unix_s: u64,
) -> Result<(), Fault> {
    let Some(ticket) = grant.ticket() else { return Ok(()) };
    let (inode, write) = match file_of(request) {
        Some(file) => file,
        None => return grant.require_service("a request of the services"),
    };
    let Some(capability) = capability else {
        return Err(Fault::forbidden(format!("{inode} without a capability for it")));
    };
    if write && ticket.read_only {
        return Err(Fault::forbidden(format!("the credential for `{}` only reads", ticket.path)));
    }
    capability.check(&keys.current(), ticket, inode.0, write, now_unix_s)
}

/// The file of a client's request, and whether it is changed.
fn file_of(request: &StorageRequest) -> Option<(InodeId, bool)> {
    match request {
        StorageRequest::Update(update) => Some((update.chunk.inode, true)),
        StorageRequest::Read(read) => Some((read.chunk.inode, false)),
        StorageRequest::QueryChunks(query) => Some((query.inode, false)),
        StorageRequest::QueryLastChunk(query) => Some((query.inode, false)),
        StorageRequest::Forward(_)
        | StorageRequest::Replace(_)
        | StorageRequest::Repair(_)
        | StorageRequest::SyncStart(_)
        | StorageRequest::SyncMetas(_)
        | StorageRequest::SyncDone(_)
        | StorageRequest::ForgetInodes(_)
        | StorageRequest::Purge(_) => None,
    }
}
