//! The newest update of each channel that this replica has seen, in memory. The tags kept with a
//! chunk recognise retries after restarts and head changes; this recognises late duplicates.

use std::collections::{BTreeMap, VecDeque};

use crate::ids::{ChannelId, ChunkId, ChunkVersion, ClientId, RequestTag};

/// Channels remembered: 100 bytes each, 64 clients with 1,024 channels.
const CHANNELS_MAX: usize = 65_536;

#[derive(Clone, Copy, Debug)]
struct Newest {
    sequence: u64,
    done: Option<(ChunkId, ChunkVersion)>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Channels {
    newest: BTreeMap<(ClientId, ChannelId), Newest>,
    oldest_first: VecDeque<(ClientId, ChannelId)>,
}

/// What is known of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// Nothing speaks against it.
    New,
    /// It was done and made this version.
    Done(ChunkVersion),
    /// Its channel has gone on since.
    Outdated,
}

impl Channels {
    pub(super) fn look(&self, tag: RequestTag, chunk: ChunkId) -> Known {
        match self.newest.get(&(tag.client, tag.channel)) {
            Some(newest) if newest.sequence > tag.sequence => Known::Outdated,
            Some(Newest { sequence, done: Some((done_chunk, version)) })
                if *sequence == tag.sequence && *done_chunk == chunk =>
            {
                Known::Done(*version)
            }
            _ => Known::New,
        }
    }

    pub(super) fn begun(&mut self, tag: RequestTag) {
        self.set(tag, None);
    }

    pub(super) fn done(&mut self, tag: RequestTag, chunk: ChunkId, version: ChunkVersion) {
        self.set(tag, Some((chunk, version)));
    }

    fn set(&mut self, tag: RequestTag, done: Option<(ChunkId, ChunkVersion)>) {
        let key = (tag.client, tag.channel);
        match self.newest.get_mut(&key) {
            Some(newest) if newest.sequence > tag.sequence => {}
            Some(newest) if newest.sequence == tag.sequence => newest.done = done.or(newest.done),
            Some(newest) => *newest = Newest { sequence: tag.sequence, done },
            None => {
                self.newest.insert(key, Newest { sequence: tag.sequence, done });
                self.oldest_first.push_back(key);
                if self.oldest_first.len() > CHANNELS_MAX
                    && let Some(oldest) = self.oldest_first.pop_front()
                {
                    self.newest.remove(&oldest);
                }
            }
        }
    }
}
