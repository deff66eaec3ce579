//! Tags that make updates exactly-once: a channel carries one update at a time, and goes back for
//! the next one only when its update has an answer. One without an answer is never used again,
//! because a late copy of its update may still be on its way.

use std::sync::{Mutex, PoisonError};

use threefs_core::ids::{ChannelId, ClientId, RequestTag};

/// All channels of one life of a client.
pub(crate) struct Channels {
    state: Mutex<State>,
}

struct State {
    client: ClientId,
    /// Free channels and the sequence number that each takes next.
    free: Vec<(ChannelId, u64)>,
    opened: u32,
}

impl Channels {
    /// None open yet.
    pub(crate) fn new(client: ClientId) -> Self {
        Self { state: Mutex::new(State { client, free: Vec::new(), opened: 0 }) }
    }

    /// Sends the updates from now on as another client. Those under way keep their tags.
    pub(crate) fn rename(&self, client: ClientId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State { client, free: Vec::new(), opened: 0 };
    }

    /// A tag for one update.
    pub(crate) fn take(&self) -> RequestTag {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (channel, sequence) = state.free.pop().unwrap_or_else(|| {
            state.opened += 1;
            (ChannelId(state.opened), 1)
        });
        RequestTag { client: state.client, channel, sequence }
    }

    /// The update has its answer.
    pub(crate) fn answered(&self, tag: RequestTag) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if tag.client == state.client {
            state.free.push((tag.channel, tag.sequence + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_comes_back_with_the_next_number_and_only_when_answered() {
        let channels = Channels::new(ClientId(7));
        let first = channels.take();
        let lost = channels.take();
        assert_ne!(first.channel, lost.channel);
        channels.answered(first);
        let next = channels.take();
        assert_eq!((next.channel, next.sequence), (first.channel, first.sequence + 1));
        let fresh = channels.take();
        assert!(fresh.channel != lost.channel && fresh.channel != next.channel);
    }

    #[test]
    fn a_renamed_client_starts_with_fresh_channels() {
        let channels = Channels::new(ClientId(7));
        let before = channels.take();
        channels.rename(ClientId(8));
        channels.answered(before);
        let after = channels.take();
        assert_eq!((after.client, after.channel, after.sequence), (ClientId(8), ChannelId(1), 1));
        assert_eq!(channels.take().channel, ChannelId(2));
    }
}
