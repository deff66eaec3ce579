//! Requests of clients and of other replicas.

use std::sync::Arc;

use bytes::Bytes;
use fabric::boot_instant::BootInstant;
use threefs_core::error::StorageError;
use threefs_core::message::StorageRequest;
use tokio::sync::oneshot;

use super::{Incoming, Response, Target, small};

impl Target {
    /// Handles a request of another process; returns its response.
    pub(crate) async fn request(
        self: &Arc<Self>,
        request: StorageRequest,
        payload: Bytes,
        expires: Option<BootInstant>,
    ) -> Response {
        let expires = expires.map(|at| self.context.clock.at(at));
        let (answer, reply) = oneshot::channel();
        // Most need no disk: what they confirm is pending here.
        let is_confirm = matches!(request, StorageRequest::Confirm(_));
        let is_small_update = small::is_small(&payload)
            && matches!(
                request,
                StorageRequest::Update(_) | StorageRequest::Forward(_) | StorageRequest::Prepare(_)
            );
        let incoming = Incoming::Request { request, payload, expires, answer };
        let _load = is_small_update.then(|| self.context.flushes.load.start());
        if is_confirm {
            self.process_inline(incoming);
        } else {
            self.enqueue(incoming);
        }
        reply.await.unwrap_or_else(|_| {
            (Err(StorageError::Timeout { target: self.config.target }), Bytes::new())
        })
    }
}
