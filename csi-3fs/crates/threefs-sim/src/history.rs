//! Linearizability check of the replies to clients.
//!
//! Every reply names a version of its chunk, so linearizability can be checked without a search:
//! the versions are the order, and real time must agree with it. The versions are those that
//! serving replicas commit (with a lease, so the chain cannot have continued without them).

use std::collections::BTreeMap;

use bytes::Bytes;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChunkId, ChunkVersion, RequestTag};

use crate::store::{Slot, Store, Version};

/// An update as intended by a client.
#[derive(Clone, Debug)]
pub struct Intent {
    /// The chunk.
    pub chunk: ChunkId,
    /// The change.
    pub change: ContentChange,
    /// Its payload.
    pub payload: Bytes,
}

#[derive(Clone, Debug)]
struct CompletedRequest {
    invoked: u64,
    completed: u64,
    version: ChunkVersion,
    /// The request is an update: its version must be later than all earlier results.
    is_write: bool,
}

#[derive(Clone, Debug)]
struct CommittedVersion {
    tag: RequestTag,
    content: Bytes,
    /// Made from no earlier content.
    fresh: bool,
}

/// History of a schedule.
#[derive(Debug, Default)]
pub struct History {
    intents: BTreeMap<RequestTag, Intent>,
    completed_requests: BTreeMap<ChunkId, Vec<CompletedRequest>>,
    committed_versions: BTreeMap<(ChunkId, ChunkVersion), CommittedVersion>,
    versions: BTreeMap<RequestTag, ChunkVersion>,
    /// Last promotion of a target without all updates of a chunk.
    promoted_at: BTreeMap<ChunkId, u64>,
    /// The newest purged version of a chunk. A replica without the chunk has removed it by that
    /// version.
    purged: BTreeMap<ChunkId, ChunkVersion>,
    /// Number of answered reads and updates.
    pub answers: u64,
}

impl History {
    /// Records an update that a client starts.
    pub fn invoke(&mut self, tag: RequestTag, intent: Intent) {
        self.intents.insert(tag, intent);
    }

    /// Records a version committed by a serving replica.
    ///
    /// # Errors
    /// Another replica has committed other content as this version, or the update has made another
    /// version before, or the content does not follow from the previous version.
    pub fn committed(
        &mut self,
        chunk: ChunkId,
        version: ChunkVersion,
        tag: RequestTag,
        content_version: &Version,
    ) -> Result<(), String> {
        let content = &content_version.bytes;
        if let Some(before) = self.committed_versions.get(&(chunk, version)) {
            if before.tag != tag || before.content != content {
                return Err(format!(
                    "{chunk} version {version} was made by {} as {:?} and by {tag} as {content:?}",
                    before.tag, before.content
                ));
            }
            return Ok(());
        }
        if let Some(before) = self.versions.insert(tag, version)
            && before != version
        {
            return Err(format!("{tag} made versions {before} and {version} of {chunk}"));
        }
        let committed_versions =
            CommittedVersion { tag, content: content.clone(), fresh: content_version.fresh };
        self.committed_versions.insert((chunk, version), committed_versions);
        self.check_content(chunk, version)?;
        self.check_content(chunk, version.next())
    }

    /// Records that a replica has dropped a chunk that was removed by this version.
    pub fn purged(&mut self, chunk: ChunkId, version: ChunkVersion) {
        let floor = self.purged.entry(chunk).or_default();
        *floor = version.max(*floor);
    }

    /// The actual version of a chunk with this reported version: 0 means the purged version.
    #[must_use]
    pub fn resolve_version(&self, chunk: ChunkId, version: ChunkVersion) -> ChunkVersion {
        match version {
            ChunkVersion(0) => self.purged.get(&chunk).copied().unwrap_or_default(),
            version => version,
        }
    }

    fn check_content(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), String> {
        let Some(after) = self.committed_versions.get(&(chunk, version)) else { return Ok(()) };
        let before = match version.0 {
            0 | 1 => Bytes::new(),
            _ => match self.committed_versions.get(&(chunk, ChunkVersion(version.0 - 1))) {
                Some(before) => before.content.clone(),
                // Versions continue above those of all purged chunks.
                None if after.fresh => Bytes::new(),
                None => return Ok(()),
            },
        };
        let Some(intent) = self.intents.get(&after.tag) else {
            return Err(format!(
                "{chunk} version {version} was made by an unknown update: {}",
                after.tag
            ));
        };
        let expected = Store::changed(&before, intent.change, &intent.payload);
        if intent.chunk != chunk || expected != after.content {
            return Err(format!(
                "{chunk} version {version} is {:?}, {:?} of {before:?} would be {expected:?}",
                after.content, intent
            ));
        }
        Ok(())
    }

    /// Records the reply to an update, which made `version`.
    ///
    /// # Errors
    /// Another update made that version, or the update made another one.
    pub fn acknowledged(
        &mut self,
        tag: RequestTag,
        invoked: u64,
        completed: u64,
        version: ChunkVersion,
    ) -> Result<(), String> {
        let Some(intent) = self.intents.get(&tag) else {
            return Err(format!("reply to an unknown update {tag}"));
        };
        let chunk = intent.chunk;
        if self.is_before_promotion(chunk, invoked) {
            return Ok(());
        }
        let version = self.resolve_version(chunk, version);
        let removed_nothing =
            intent.change == ContentChange::Remove && self.versions.get(&tag) != Some(&version);
        if !removed_nothing {
            if let Some(committed_versions) = self.committed_versions.get(&(chunk, version))
                && committed_versions.tag != tag
            {
                return Err(format!(
                    "the reply to {tag} names {chunk} version {version}, which {} made",
                    committed_versions.tag
                ));
            }
            if let Some(other) = self.versions.insert(tag, version)
                && other != version
            {
                return Err(format!(
                    "the reply to {tag} names version {version}, but it made {other} of {chunk}"
                ));
            }
        }
        self.answers += 1;
        let is_write = !removed_nothing;
        self.completed_requests.entry(chunk).or_default().push(CompletedRequest {
            invoked,
            completed,
            version,
            is_write,
        });
        Ok(())
    }

    /// Records the reply to a read, with `content` as `version`.
    ///
    /// # Errors
    /// The version has other content.
    pub fn read(
        &mut self,
        chunk: ChunkId,
        invoked: u64,
        completed: u64,
        version: ChunkVersion,
        content: &Bytes,
    ) -> Result<(), String> {
        if self.is_before_promotion(chunk, invoked) {
            return Ok(());
        }
        let version = self.resolve_version(chunk, version);
        if let Some(committed_versions) = self.committed_versions.get(&(chunk, version))
            && committed_versions.content != content
        {
            return Err(format!(
                "{chunk} version {version} was read as {content:?}, it is {:?}",
                committed_versions.content
            ));
        }
        self.answers += 1;
        self.completed_requests.entry(chunk).or_default().push(CompletedRequest {
            invoked,
            completed,
            version,
            is_write: false,
        });
        Ok(())
    }

    /// Records the promotion of another target of a chain without a serving one: data that its
    /// store lacks is lost. Replies to earlier requests are no longer checked.
    ///
    /// # Errors
    /// As [`Self::check_order`], for the replies until now.
    pub fn promoted(
        &mut self,
        now: u64,
        chunks: impl Iterator<Item = ChunkId>,
        slots: &BTreeMap<ChunkId, Slot>,
    ) -> Result<(), String> {
        self.check_order()?;
        for chunk in chunks {
            let copy = slots.get(&chunk).map(|slot| slot.committed.clone()).unwrap_or_default();
            let newest = copy.state.version;
            self.committed_versions.retain(|(of, version), _| *of != chunk || *version < newest);
            self.versions.retain(|tag, version| {
                self.intents.get(tag).is_none_or(|it| it.chunk != chunk) || *version <= newest
            });
            if let Some(newest_tag) = copy.state.tags.newest() {
                let committed_versions = CommittedVersion {
                    tag: newest_tag.tag,
                    content: copy.bytes,
                    fresh: copy.fresh,
                };
                self.committed_versions.insert((chunk, newest), committed_versions);
                self.versions.insert(newest_tag.tag, newest);
            }
            self.completed_requests.remove(&chunk);
            self.purged.remove(&chunk);
            self.promoted_at.insert(chunk, now);
        }
        Ok(())
    }

    fn is_before_promotion(&self, chunk: ChunkId, invoked: u64) -> bool {
        self.promoted_at.get(&chunk).is_some_and(|at| invoked <= *at)
    }

    /// Checks that real time agrees with the order of versions, on every chunk.
    ///
    /// # Errors
    /// A request that started after another had ended precedes it.
    pub fn check_order(&self) -> Result<(), String> {
        for (chunk, requests) in &self.completed_requests {
            let mut by_start: Vec<&CompletedRequest> = requests.iter().collect();
            by_start.sort_by_key(|request| request.invoked);
            let mut by_end: Vec<&CompletedRequest> = requests.iter().collect();
            by_end.sort_by_key(|request| request.completed);
            let mut completions = by_end.into_iter().peekable();
            let mut newest = ChunkVersion(0);
            for request in by_start {
                while let Some(before) =
                    completions.next_if(|before| before.completed < request.invoked)
                {
                    newest = newest.max(before.version);
                }
                let too_old = request.version < newest
                    || (request.is_write && request.version == newest && newest.0 > 0);
                if too_old {
                    return Err(format!(
                        "{chunk}: {} of version {} started at {} us, after version {newest} was \
                         known to a client",
                        if request.is_write { "an update" } else { "a read" },
                        request.version,
                        request.invoked
                    ));
                }
            }
        }
        Ok(())
    }

    /// The newest version of a chunk that any client has observed.
    #[must_use]
    pub fn newest_known(&self, chunk: ChunkId) -> ChunkVersion {
        let versions = self
            .completed_requests
            .get(&chunk)
            .into_iter()
            .flatten()
            .map(|request| request.version);
        versions.max().unwrap_or_default()
    }

    /// Chunks used by clients.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkId> {
        self.completed_requests.keys().copied()
    }
}
