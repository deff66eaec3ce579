//! Exactly-once chunk updates.
//!
//! Updates carry request tags: a channel carries one update at a time, and is reused only when its
//! update was answered. A channel without an answer is never reused, because a late copy of its
//! update may still arrive.

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, NotAfter};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChannelId, ChunkVersion, ClientId, RequestTag};
use threefs_core::message::{Address, StorageReply, StorageRequest, UpdateRequest, Updated};

use crate::Client;
use crate::config::BUSY_TIMEOUT_FACTOR;
use crate::error::{Attempts, ClientError, OperationName};
use crate::routing::{ChunkLocation, head, who};
use crate::storage::{Overload, ROUTING_PAUSE, is_overloaded};
use crate::window::ProgressTimeout;

/// All channels of one incarnation of a client.
pub(crate) struct Channels {
    state: Mutex<State>,
}

struct State {
    client: ClientId,
    /// Free channels and the sequence number that each takes next.
    free: Vec<(ChannelId, u64)>,
    channel_count: u32,
}

impl Channels {
    /// Creates no channels yet.
    pub(crate) fn new(client: ClientId) -> Self {
        Self { state: Mutex::new(State { client, free: Vec::new(), channel_count: 0 }) }
    }

    /// Sends subsequent updates as another client. Updates in flight keep their tags.
    pub(crate) fn rename(&self, client: ClientId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State { client, free: Vec::new(), channel_count: 0 };
    }

    /// Returns a tag for one update.
    pub(crate) fn take(&self) -> RequestTag {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (channel, sequence) = state.free.pop().unwrap_or_else(|| {
            state.channel_count += 1;
            (ChannelId(state.channel_count), 1)
        });
        RequestTag { client: state.client, channel, sequence }
    }

    /// The update was answered: its channel can be reused.
    pub(crate) fn release(&self, tag: RequestTag) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if tag.client == state.client {
            state.free.push((tag.channel, tag.sequence + 1));
        }
    }
}

impl Client {
    /// Applies one update on all serving replicas, exactly once.
    pub(crate) fn update<'a>(
        &'a self,
        what: &'a OperationName,
        location: ChunkLocation,
        change: ContentChange,
        payload: Bytes,
        patience: impl Into<ProgressTimeout>,
    ) -> BoxFuture<'a, Result<Updated, ClientError>> {
        Box::pin(self.update_now(what, location, None, change, payload, patience.into()))
    }

    /// As [`Client::update`], without payload, only if `at` is the committed version of the chunk.
    pub(crate) fn update_at<'a>(
        &'a self,
        what: &'a OperationName,
        location: ChunkLocation,
        at: ChunkVersion,
        change: ContentChange,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<Updated, ClientError>> {
        let (at, payload) = (Some(at), Bytes::new());
        Box::pin(self.update_now(what, location, at, change, payload, deadline.into()))
    }

    async fn update_now(
        &self,
        what: &OperationName,
        location: ChunkLocation,
        at: Option<ChunkVersion>,
        change: ContentChange,
        payload: Bytes,
        patience: ProgressTimeout,
    ) -> Result<Updated, ClientError> {
        let tag = self.0.channels.take();
        let result = self.update_tagged(what, location, at, change, payload, tag, &patience).await;
        // After an error a copy may still be in flight: the channel is abandoned.
        if matches!(result, Ok(_) | Err(ClientError::NotReserved { .. })) {
            self.0.channels.release(tag);
        }
        result
    }

    #[allow(clippy::too_many_arguments)]
    async fn update_tagged(
        &self,
        what: &OperationName,
        location: ChunkLocation,
        at: Option<ChunkVersion>,
        change: ContentChange,
        payload: Bytes,
        tag: RequestTag,
        patience: &ProgressTimeout,
    ) -> Result<Updated, ClientError> {
        let payload_checksum = Checksum::of(&payload);
        let ChunkLocation { chain, chunk, chunk_bytes } = location;
        // Each attempt has the newest epoch that is known, and the same tag.
        let build_request = |to| {
            let update = UpdateRequest { to, chunk, tag, change, payload_checksum, chunk_bytes };
            self.0.metadata.places().request(update, at, BootInstant::now())
        };
        let mut attempts = Attempts::of(&**what);
        match self.call_head(chain, &mut attempts, payload, patience, build_request).await? {
            Some((_, StorageReply::Updated(updated))) => Ok(updated),
            Some((who, other)) => Err(ClientError::unexpected(&who, &other)),
            None => Err(attempts.unavailable(self.0.config.timeout)),
        }
    }

    /// Calls the head of a chain until it answers, following changes of the head. Returns its name
    /// and reply, or `None` at the deadline.
    pub(crate) async fn call_head(
        &self,
        chain: ChainId,
        attempts: &mut Attempts,
        payload: Bytes,
        patience: &ProgressTimeout,
        build_request: impl Fn(Address) -> StorageRequest,
    ) -> Result<Option<(String, StorageReply)>, ClientError> {
        let mut overload = Overload::default();
        while !patience.expired() {
            // Later attempts may have a later deadline, never an earlier one: nothing that was sent
            // may start after the operation has failed.
            let deadline = patience.deadline();
            let not_after = NotAfter { lease: self.1.clone(), end: deadline };
            let Some(routing) = self.0.routing.current(attempts, deadline).await? else {
                break;
            };
            let Some((to, head)) = head(&routing, chain, attempts) else {
                self.0.routing.wait_newer(routing.version, deadline.within(ROUTING_PAUSE)).await;
                continue;
            };
            let request = build_request(to);
            let options = CallOptions {
                not_after: request.is_update().then_some(&not_after),
                class: request.class(),
                idle_timeout: Some(self.0.config.update_attempt_timeout),
            };
            let attempt =
                deadline.within(self.0.config.update_attempt_timeout * BUSY_TIMEOUT_FACTOR);
            let payload = payload.clone().into();
            let call = self.call(&routing, head.node, &request, payload, attempt, options);
            let other_head = self
                .0
                .routing
                .until(|now| now.chain(chain).is_none_or(|chain| chain.head() != Some(&head)));
            let who = who(&routing, &head);
            let result = tokio::select! {
                result = call => result,
                // The head was replaced during the call; the new one recognizes the tag.
                () = other_head => {
                    attempts.mark_in_doubt();
                    attempts.record_failure(&who, "it was replaced before it answered");
                    continue;
                }
            };
            match attempts.call(result)? {
                Ok((Ok(reply), _)) => return Ok(Some((who, reply))),
                Ok((Err(error), _)) => {
                    // The head may have the update, and forward it later.
                    attempts.mark_in_doubt();
                    self.after_refusal(&routing, &who, error, attempts, deadline).await?;
                }
                Err(error) if is_overloaded(&error) => {
                    attempts.record_failure(&who, &error);
                    overload.pause(deadline).await;
                }
                Err(error) => {
                    attempts.rpc(&who, &error)?;
                    let pause = deadline.within(ROUTING_PAUSE);
                    self.0.routing.wait_newer(routing.version, pause).await;
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_is_reused_with_the_next_number_only_when_answered() {
        let channels = Channels::new(ClientId(7));
        let first = channels.take();
        let unanswered = channels.take();
        assert_ne!(first.channel, unanswered.channel);
        channels.release(first);
        let next = channels.take();
        assert_eq!((next.channel, next.sequence), (first.channel, first.sequence + 1));
        let fresh = channels.take();
        assert!(fresh.channel != unanswered.channel && fresh.channel != next.channel);
    }

    #[test]
    fn a_renamed_client_starts_with_fresh_channels() {
        let channels = Channels::new(ClientId(7));
        let before = channels.take();
        channels.rename(ClientId(8));
        channels.release(before);
        let after = channels.take();
        assert_eq!((after.client, after.channel, after.sequence), (ClientId(8), ChannelId(1), 1));
        assert_eq!(channels.take().channel, ChannelId(2));
    }
}
