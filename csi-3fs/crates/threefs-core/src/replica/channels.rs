//! Deduplication of updates by channel, in memory: the newest update of each channel. Detects late
//! duplicates; the tags stored with a chunk detect retries after restarts and head changes.

use std::collections::BTreeMap;

use crate::ids::{ChannelId, ChunkId, ChunkVersion, ClientId, RequestTag};

/// Maximum number of channels, 200 bytes each.
const CHANNELS_MAX: usize = 65_536;
/// Maximum per client, which has one for each update in flight and abandons those without a reply.
/// Beyond it, the client's own least recently used channel is evicted.
const CHANNELS_OF_CLIENT_MAX: usize = 4_096;

#[derive(Clone, Copy, Debug)]
struct Newest {
    sequence: u64,
    result: Option<(ChunkId, ChunkVersion)>,
    /// Last use, as a count of uses.
    last_use: u64,
}

/// The newest update of each channel.
#[derive(Debug, Default)]
pub(super) struct Channels {
    newest: BTreeMap<(ClientId, ChannelId), Newest>,
    uses: u64,
    by_use: BTreeMap<u64, (ClientId, ChannelId)>,
    of_client: BTreeMap<ClientId, BTreeMap<u64, ChannelId>>,
}

/// Status of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagStatus {
    /// Not seen before.
    New,
    /// Completed with this version.
    Done(ChunkVersion),
    /// Its channel has sent newer updates.
    Outdated,
    /// A later incarnation of its client has sent updates.
    Superseded(ClientId),
}

impl Channels {
    pub(super) fn status(&self, tag: RequestTag, chunk: ChunkId) -> TagStatus {
        if let Some(successor) = self.successor(tag.client) {
            return TagStatus::Superseded(successor);
        }
        match self.newest.get(&(tag.client, tag.channel)) {
            Some(newest) if newest.sequence > tag.sequence => TagStatus::Outdated,
            Some(Newest { sequence, result: Some((done_chunk, version)), .. })
                if *sequence == tag.sequence && *done_chunk == chunk =>
            {
                TagStatus::Done(*version)
            }
            _ => TagStatus::New,
        }
    }

    /// The newest of the later incarnations of a client.
    fn successor(&self, client: ClientId) -> Option<ClientId> {
        let last_life = ClientId::with_incarnation(client.0, u32::MAX);
        let newest = self.of_client.range(client..=last_life).next_back().map(|(id, _)| *id);
        newest.filter(|newest| newest.supersedes(client))
    }

    pub(super) fn record_start(&mut self, tag: RequestTag) {
        self.set(tag, None);
    }

    pub(super) fn record_result(&mut self, tag: RequestTag, chunk: ChunkId, version: ChunkVersion) {
        self.set(tag, Some((chunk, version)));
    }

    fn set(&mut self, tag: RequestTag, result: Option<(ChunkId, ChunkVersion)>) {
        let key = (tag.client, tag.channel);
        let before = self.newest.get(&key).copied();
        let (sequence, result) = match before {
            Some(newest) if newest.sequence > tag.sequence => (newest.sequence, newest.result),
            Some(newest) if newest.sequence == tag.sequence => {
                (tag.sequence, result.or(newest.result))
            }
            _ => (tag.sequence, result),
        };
        if before.is_some() {
            self.remove(key);
        }
        self.uses += 1;
        let last_use = self.uses;
        self.newest.insert(key, Newest { sequence, result, last_use });
        self.by_use.insert(last_use, key);
        let own = self.of_client.entry(tag.client).or_default();
        own.insert(last_use, tag.channel);
        if own.len() > CHANNELS_OF_CLIENT_MAX
            && let Some((_, &channel)) = own.first_key_value()
        {
            self.remove((tag.client, channel));
        }
        if self.newest.len() > CHANNELS_MAX
            && let Some((_, &oldest)) = self.by_use.first_key_value()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, key: (ClientId, ChannelId)) {
        let Some(evicted) = self.newest.remove(&key) else { return };
        self.by_use.remove(&evicted.last_use);
        if let Some(own) = self.of_client.get_mut(&key.0) {
            own.remove(&evicted.last_use);
            if own.is_empty() {
                self.of_client.remove(&key.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::InodeId;

    const CHUNK: ChunkId = ChunkId::new(InodeId(5), 0);

    fn tag(client: u128, channel: u32, sequence: u64) -> RequestTag {
        RequestTag {
            client: ClientId::with_incarnation(client << 32, 0),
            channel: ChannelId(channel),
            sequence,
        }
    }

    #[test]
    fn a_client_with_many_channels_evicts_its_own_least_recently_used() {
        let mut channels = Channels::default();
        channels.record_result(tag(1, 0, 1), CHUNK, ChunkVersion(7));
        channels.record_result(tag(2, 0, 1), CHUNK, ChunkVersion(8));
        for channel in 1..=CHANNELS_MAX as u32 * 2 {
            channels.record_result(tag(2, channel, 1), CHUNK, ChunkVersion(9));
            // Used repeatedly, so it is kept.
            channels.record_start(tag(2, 1, u64::from(channel)));
        }
        assert_eq!(channels.status(tag(1, 0, 1), CHUNK), TagStatus::Done(ChunkVersion(7)));
        assert_eq!(channels.status(tag(2, 0, 1), CHUNK), TagStatus::New, "least recently used");
        assert_eq!(channels.status(tag(2, 1, 1), CHUNK), TagStatus::Outdated);
        assert_eq!(channels.newest.len(), CHANNELS_OF_CLIENT_MAX + 1);
        assert_eq!(channels.by_use.len(), channels.newest.len());
    }

    #[test]
    fn updates_of_an_earlier_incarnation_are_refused_while_a_later_one_is_remembered() {
        let lives =
            |life| RequestTag { client: ClientId::with_incarnation(5 << 32, life), ..tag(0, 0, 1) };
        let mut channels = Channels::default();
        channels.record_result(lives(2), CHUNK, ChunkVersion(7));
        assert_eq!(channels.status(lives(1), CHUNK), TagStatus::Superseded(lives(2).client));
        assert_eq!(channels.status(lives(2), CHUNK), TagStatus::Done(ChunkVersion(7)));
        assert_eq!(channels.status(lives(3), CHUNK), TagStatus::New);
        assert_eq!(channels.status(tag(4, 0, 1), CHUNK), TagStatus::New, "another client");
    }

    #[test]
    fn the_total_is_bounded_and_the_least_recently_used_is_evicted() {
        let mut channels = Channels::default();
        for client in 0..=CHANNELS_MAX as u128 {
            channels.record_result(tag(client, 0, 1), CHUNK, ChunkVersion(7));
        }
        assert_eq!(channels.newest.len(), CHANNELS_MAX);
        assert_eq!(channels.of_client.len(), CHANNELS_MAX);
        assert_eq!(channels.status(tag(0, 0, 1), CHUNK), TagStatus::New);
        assert_eq!(channels.status(tag(1, 0, 1), CHUNK), TagStatus::Done(ChunkVersion(7)));
    }
}
