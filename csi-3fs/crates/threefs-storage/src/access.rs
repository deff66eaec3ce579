//! Access control of volume credentials: a credential may make client requests for files that the
//! metadata service gave it a capability for, and may update only the bytes that the capability's
//! terms name. Requests between replicas require the cluster's key.

use std::sync::Arc;

use fabric::auth::capability::Capability;
use fabric::auth::keys::Keys;
use fabric::auth::ticket::Grant;
use fabric::rpc::{Fault, FaultCode, decode};
use threefs_core::ids::InodeId;
use threefs_core::message::StorageRequest;
use threefs_core::routing::RoutingInfo;
use threefs_core::terms::{FileTerms, TermsError};

pub(crate) fn permit(
    grant: &Grant,
    request: &StorageRequest,
    payload_bytes: usize,
    capability: Option<&Capability>,
    keys: &Keys,
    now_unix_s: u64,
    routing: impl FnOnce() -> Arc<RoutingInfo>,
) -> Result<(), Fault> {
    let Some(ticket) = grant.ticket() else { return Ok(()) };
    let (inode, write) = match file_of(request) {
        Some(file) => file,
        None => return grant.require_service("a request of the services"),
    };
    let Some(capability) = capability else {
        return Err(Fault::forbidden(format!("no capability for {inode}")));
    };
    if write && ticket.read_only {
        return Err(Fault::forbidden(format!("the credential for `{}` is read-only", ticket.path)));
    }
    capability.check(&keys.current(), ticket, inode.0, write, now_unix_s)?;
    let StorageRequest::Update(update) = request else { return Ok(()) };
    let terms: FileTerms = decode(capability.terms())
        .map_err(|error| Fault::bad_request(format!("invalid terms of the capability: {error}")))?;
    terms.check(update, payload_bytes, &routing(), now_unix_s).map_err(fault)
}

fn fault(error: TermsError) -> Fault {
    let code = if error.is_recoverable() { FaultCode::Expired } else { FaultCode::Forbidden };
    Fault { code, detail: error.to_string() }
}

/// The file of a client's request, and whether the request changes it.
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
